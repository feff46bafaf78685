// A learner in another language: follows a run, pulls a fragment, pushes a delta, sees it merged, and pulls the update.
// It knows the .proto files and FORMAT.md, speaks float32 without compression, and checks every digest.
//
//   node client.cjs <folder of the .proto files> <folder of the test vectors> <host:port> <run> <fragment> <ca.pem> <own .pem> <own .key>
//
// Prints one line of JSON a step, and exits with 0 when all of it came true.
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const { blake3 } = require('@noble/hashes/blake3');

const [protoFolder, vectorFolder, target, runName, fragmentName, ...pemFiles] = process.argv.slice(2);
const HEADER_SIZE = 32;
const LEAF_NUMEL = 2 ** 20;
const FRAME_NUMEL = 2 ** 16;
const STEPS = 4;

const definition = protoLoader.loadSync(['skerry/v1/exchange.proto', 'skerry/v1/runs.proto', 'skerry/v1/capabilities.proto'], {
  includeDirs: [protoFolder],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { skerry } = grpc.loadPackageDefinition(definition);
const [ca, cert, key] = pemFiles.map((file) => fs.readFileSync(file));
const credentials = grpc.credentials.createSsl(ca, key, cert);
const exchange = new skerry.v1.Exchange(target, credentials);
const runs = new skerry.v1.Runs(target, credentials);
const capabilities = new skerry.v1.Capabilities(target, credentials);

const say = (step, facts) => process.stdout.write(`${JSON.stringify({ step, ...facts })}\n`);
const digestOf = (...chunks) => Buffer.from(blake3(Buffer.concat(chunks)));
const randomId = () => crypto.randomBytes(16).toString('hex');
const u64 = (value) => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
};

function expect(claim, what) {
  if (!claim) throw new Error(`not as the contract says: ${what}`);
}

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// CRC-32, IEEE.
const crcTable = Uint32Array.from({ length: 256 }, (_, index) => {
  let value = index;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value >>> 0;
});
function crc32(...chunks) {
  let crc = 0xffffffff;
  for (const chunk of chunks) for (const byte of chunk) crc = (crc >>> 8) ^ crcTable[(crc ^ byte) & 0xff];
  return (crc ^ 0xffffffff) >>> 0;
}

const bytesOf = (values) => Buffer.from(values.buffer, values.byteOffset, values.byteLength);

function treeDigest(values) {
  const leaves = [];
  for (let first = 0; first < values.length; first += LEAF_NUMEL) {
    leaves.push(digestOf(bytesOf(values.subarray(first, first + LEAF_NUMEL))));
  }
  return digestOf(Buffer.from('skerry.tree.v1\0'), u64(values.length), ...leaves);
}

function deltaDigest(parts) {
  return digestOf(Buffer.from('skerry.delta.v1\0'), ...parts.flatMap(({ first, numel, digest }) => [u64(first), u64(numel), digest]));
}

// One float32 frame without compression.
function encodeFrame(values, first) {
  const payload = bytesOf(values);
  const header = Buffer.alloc(HEADER_SIZE);
  header.write('SKF1', 0, 'latin1');
  header.writeUInt8(1, 4);
  header.writeBigUInt64LE(BigInt(first), 8);
  header.writeUInt32LE(values.length, 16);
  header.writeUInt32LE(payload.length, 20);
  header.writeUInt32LE(payload.length, 24);
  header.writeUInt32LE(crc32(header.subarray(0, 28), payload), 28);
  return Buffer.concat([header, payload]);
}

// Calls `take` with the index and the value of each element of float32 frames.
function readFrames(data, take) {
  for (let at = 0; at < data.length; ) {
    expect(data.toString('latin1', at, at + 4) === 'SKF1', 'a frame begins with its magic');
    expect(data.readUInt8(at + 4) === 1 && data.readUInt8(at + 5) === 0, 'the frame is float32 without compression');
    const first = Number(data.readBigUInt64LE(at + 8));
    const numel = data.readUInt32LE(at + 16);
    const end = at + HEADER_SIZE + data.readUInt32LE(at + 20);
    const payload = data.subarray(at + HEADER_SIZE, end);
    expect(crc32(data.subarray(at, at + 28), payload) === data.readUInt32LE(at + 28), 'the checksum holds');
    for (let index = 0; index < numel; index += 1) {
      take(first + index, payload.readFloatLE(4 * index));
    }
    at = end;
  }
}

// The key that a tensor has in a snapshot that holds these tensors: safetensors keeps `__metadata__` for itself.
function tensorKey(name, tensors) {
  if (name !== '__metadata__') return name;
  let key = `${name}.tensor`;
  while (tensors.includes(key)) key += '.tensor';
  return key;
}

// Fills the weights from a safetensors file of the whole fragment.
function readSnapshot(weights, data, tensors) {
  const headerSize = Number(data.readBigUInt64LE(0));
  const header = JSON.parse(data.toString('utf8', 8, 8 + headerSize));
  let element = 0;
  for (const name of tensors) {
    const { dtype, data_offsets: [begin, end] } = header[tensorKey(name, tensors)];
    expect(dtype === 'F32', 'snapshots are float32');
    for (let at = begin; at < end; at += 4) weights[element++] = data.readFloatLE(8 + headerSize + at);
  }
  expect(element === weights.length, 'the snapshot has every element');
}

async function pull(run, fragment, numel, base) {
  const stream = exchange.PullFragment({
    run: run.name, run_uid: run.uid, fragment: fragment.name, from_version: base ? base.version : -1, is_newest: true,
  });
  let plan;
  const objects = [];
  for await (const message of stream) {
    if (message.kind === 'plan') {
      plan = message.plan;
      plan.objects.forEach(() => objects.push([]));
    } else {
      objects[message.data.object_index].push(message.data.data);
    }
  }
  // A plan may start from a snapshot though the caller has a version.
  const weights = plan.from_version >= 0 ? Float32Array.from(base.weights) : new Float32Array(numel);
  plan.objects.forEach((object, index) => {
    const data = Buffer.concat(objects[index]);
    expect(data.length === object.size_bytes && digestOf(data).equals(object.digest), 'an object is what the plan says');
    if (object.kind === 'OBJECT_KIND_SNAPSHOT') readSnapshot(weights, data, fragment.tensors);
    else readFrames(data, (at, step) => { weights[at] = Math.fround(weights[at] - step); });
  });
  expect(treeDigest(weights).equals(plan.target.digest), 'the weights have the digest of their version');
  return { version: plan.target.version, digest: plan.target.digest, weights, kinds: plan.objects.map((one) => one.kind) };
}

function push(header, delta) {
  return new Promise((resolve, reject) => {
    const stream = exchange.PushDelta((error, answer) => (error ? reject(error) : resolve(answer)));
    const digest = digestOf(bytesOf(delta));
    stream.write({ header });
    stream.write({ part: { first: 0, numel: delta.length } });
    for (let first = 0; first < delta.length; first += FRAME_NUMEL) {
      stream.write({ data: encodeFrame(delta.subarray(first, first + FRAME_NUMEL), first) });
    }
    stream.write({ part_end: { digest } });
    stream.write({ complete: { digest: deltaDigest([{ first: 0, numel: delta.length, digest }]) } });
    stream.end();
  });
}

// The attachment: events by kind, each given once to whoever waits for it.
function attach(run, learnerId, sessionId) {
  const stream = exchange.Attach();
  const waiting = [];
  const seen = [];
  let failure = null;
  const settle = () => {
    for (const one of [...waiting]) {
      const at = seen.findIndex(one.test);
      if (at >= 0) one.resolve(seen.splice(at, 1)[0]);
      else if (failure) one.reject(failure);
      else continue;
      waiting.splice(waiting.indexOf(one), 1);
    }
  };
  stream.on('data', (message) => { seen.push(message); settle(); });
  stream.on('error', (error) => { failure = error; settle(); });
  stream.write({ hello: { run: run.name, run_uid: run.uid, learner_id: learnerId, region: 'node', session_id: sessionId } });
  const next = (test) => new Promise((resolve, reject) => { waiting.push({ test, resolve, reject }); settle(); });
  return { stream, next };
}

// The vectors with which clients in every language check themselves.
function checkVectors() {
  const read = (name) => JSON.parse(fs.readFileSync(path.join(vectorFolder, name)));
  for (const { name, first, values, frames, part_digest } of read('float32.json').cases) {
    const words = values.split(' ').map((word) => Buffer.from(word, 'hex').reverse());
    const decoded = new Float32Array(words.length);
    frames.forEach((frame) => readFrames(Buffer.from(frame, 'hex'), (at, value) => { decoded[at - first] = value; }));
    expect(bytesOf(decoded).equals(Buffer.concat(words)), `frames decode to the vector's values: ${name}`);
    expect(digestOf(bytesOf(decoded)).toString('hex') === part_digest, `a part has the vector's digest: ${name}`);
  }
  const refused = read('refused.json').cases.find((one) => one.reason === 'CHECKSUM').frame;
  let isRefused = false;
  try { readFrames(Buffer.from(refused, 'hex'), () => {}); } catch { isRefused = true; }
  expect(isRefused, 'a frame with a flipped bit is refused');
  for (const { parts, delta_digest } of read('digests.json').deltas) {
    const digest = deltaDigest(parts.map((part) => ({ ...part, digest: Buffer.from(part.digest, 'hex') })));
    expect(digest.toString('hex') === delta_digest, "a delta has the vector's digest");
  }
  say('vectors', {});
}

async function main() {
  checkVectors();
  const offered = await call(capabilities, 'GetCapabilities', {});
  expect(offered.codecs.includes('CODEC_FLOAT32') && offered.compressors.includes('COMPRESSOR_NONE'), 'plain float32 is legal');
  const { run } = await call(runs, 'GetRun', { name: runName });
  const fragment = run.fragments.find((one) => one.name === fragmentName);
  const shapes = new Map(run.tensors.map((tensor) => [tensor.name, tensor.shape]));
  const numel = fragment.tensors.reduce((sum, name) => sum + shapes.get(name).reduce((product, size) => product * size, 1), 0);
  say('run', { uid: run.uid, status: run.status, numel });

  const sessionId = randomId();
  const { stream, next } = attach(run, 'node', sessionId);
  const { attached } = await next((message) => message.kind === 'attached');
  say('attached', { position: attached.run.position });
  stream.write({ report: { step_count: 0, step_time: { seconds: 0, nanos: 10_000_000 } } });

  const base = await pull(run, fragment, numel, null);
  say('pulled', { version: base.version, kinds: base.kinds });

  // Training moved every weight by a little: the delta is what adoption loaded minus the weights now.
  const delta = Float32Array.from({ length: numel }, (_, index) => Math.fround(Math.sin(index + 1) / 16));
  const deltaId = randomId();
  const answer = await push({
    run: run.name, run_uid: run.uid, seen_position: attached.run.position, learner_id: 'node', session_id: sessionId,
    delta_id: deltaId, fragment: fragment.name, base_version: base.version, base_digest: base.digest,
    step_count: STEPS, token_count: 100 * STEPS, last_step: STEPS,
  }, delta);
  expect(answer.state === 'PUSH_STATE_ACCEPTED', 'a whole push is accepted');
  say('pushed', { delta_id: deltaId, position: answer.position });

  const committed = (message) => message.kind === 'event' && message.event.kind === 'version_committed'
    && message.event.version_committed.merged.some((one) => one.delta_id === deltaId);
  const { event } = await next(committed);
  say('merged', { version: event.version_committed.version.version, position: event.position });

  const after = await pull(run, fragment, numel, base);
  expect(after.version === event.version_committed.version.version, 'the newest version is the one that was told of');
  const query = await call(exchange, 'QueryPush', {
    run: run.name, run_uid: run.uid, seen_position: event.position, fragment: fragment.name, delta_id: deltaId,
  });
  expect(query.fate.fate === 'FATE_MERGED' && query.fate.version === after.version, 'the fate is told');
  // The weights moved against the delta: what was learned is in them.
  const moved = after.weights.reduce((sum, value, index) => sum + (base.weights[index] - value) * delta[index], 0);
  expect(moved > 0, 'the merge went the way of the delta');
  say('updated', { version: after.version, kinds: after.kinds });

  stream.write({ leave: {} });
  stream.end();
  [exchange, runs, capabilities].forEach((client) => client.close());
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
