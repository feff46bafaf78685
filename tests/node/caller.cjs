// A client that does what it is told on standard input, and answers there: one line of JSON for each.
//
//   node caller.cjs <folder of the .proto files> <host:port>
//
// It knows the methods of the contract from the .proto files alone.
//
//   {"do": "methods"}                                every method, with the names of the fields that `call` can fill
//   {"do": "open", "channel", "ca", "cert", "key", "token"}    a connection of its own; files and token as far as given
//   {"do": "call", "channel", "method", "fields"}    sends one message, and answers when the first answer is here
//   {"do": "hold", "channel", "method", "fields"}    likewise, and the stream stays open
//   {"do": "heard", "channel"}                       the next message of that stream, or its end
//   {"do": "connect", "ca", "cert", "key", "version", "resumes"}    connects without a call, by that version of TLS;
//                                                    `resumes`: with the session of the last such connection
//
// A call's answer has the status that the client saw (`code`, `message`, `details`), and in `serial` the serial number
// of the certificate that the server of the call's connection presented.
'use strict';

const fs = require('node:fs');
const http2 = require('node:http2');
const path = require('node:path');
const readline = require('node:readline');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const [protoFolder, target] = process.argv.slice(2);
const PACKAGE = 'skerry.v1';
const DEADLINE_MS = 20_000;

const files = fs.readdirSync(path.join(protoFolder, 'skerry/v1')).filter((file) => file.endsWith('.proto'));
const definition = protoLoader.loadSync(files.map((file) => `skerry/v1/${file}`), {
  includeDirs: [protoFolder], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const methods = new Map();
for (const [service, itsMethods] of Object.entries(definition)) {
  if (itsMethods.format) continue; // a message or an enum
  for (const [name, method] of Object.entries(itsMethods)) methods.set(`${service.slice(PACKAGE.length + 1)}/${name}`, method);
}

// The fields of a stream's or call's first message, as paths. Of alternatives the contract sends the first one first.
function fieldPaths(type, prefix = []) {
  const fields = type.oneofDecl.length ? type.field.slice(0, 1) : type.field;
  return fields.filter((field) => field.label !== 'LABEL_REPEATED').flatMap((field) => {
    const message = field.type === 'TYPE_MESSAGE' && type.oneofDecl.length && definition[`${PACKAGE}.${field.typeName}`];
    return message ? fieldPaths(message.type, [...prefix, field.name]) : [[...prefix, field.name]];
  });
}

function requestOf(method, values) {
  const request = {};
  for (const fieldPath of fieldPaths(method.requestType.type)) {
    const last = fieldPath.at(-1);
    let inner = request;
    for (const name of fieldPath.slice(0, -1)) inner = inner[name] ??= {};
    if (last in values) inner[last] = values[last];
  }
  return request;
}

const channels = new Map();
const read = (file) => (file ? fs.readFileSync(file) : null);

function open({ channel, ca, cert, key, token }) {
  const tls = ca ? grpc.credentials.createSsl(read(ca), read(key), read(cert)) : grpc.credentials.createInsecure();
  const bearer = grpc.credentials.createFromMetadataGenerator((_, callback) => {
    const metadata = new grpc.Metadata();
    metadata.set('authorization', `Bearer ${token}`);
    callback(null, metadata);
  });
  const credentials = token ? grpc.credentials.combineChannelCredentials(tls, bearer) : tls;
  channels.set(channel, {
    client: new grpc.Client(target, credentials, { 'grpc.use_local_subchannel_pool': 1 }),
    heard: [], // messages and the end of the stream that is held, which nobody asked for yet
    waiting: null,
  });
  return {};
}

function tell(held, news) {
  if (!held.waiting) held.heard.push(news);
  else {
    held.waiting(news);
    held.waiting = null;
  }
}

// Begins a call with one message. Its messages and its end go to `told`.
function begin({ client }, { method: name, fields }, told, deadline) {
  const method = methods.get(name);
  const { path: wire, requestStream, responseStream, requestSerialize, responseDeserialize } = method;
  const shape = [wire, requestSerialize, responseDeserialize];
  const options = deadline ? { deadline: Date.now() + deadline } : {};
  const unary = (error, message) => message && told({ message });
  const request = requestOf(method, fields);
  let call;
  if (requestStream) {
    call = responseStream ? client.makeBidiStreamRequest(...shape, options) : client.makeClientStreamRequest(...shape, options, unary);
    call.write(request);
    if (!responseStream) call.end();
  } else if (responseStream) call = client.makeServerStreamRequest(...shape, request, options);
  else call = client.makeUnaryRequest(...shape, request, options, unary);
  call.on('data', (message) => told({ message }));
  call.on('error', () => {}); // the status says why
  call.on('status', ({ code, details, metadata }) => told({
    code: grpc.status[code],
    message: details,
    details: metadata.get('grpc-status-details-bin').map((bytes) => bytes.toString('base64'))[0] ?? '',
  }));
  return call;
}

let session; // of the last connection without a call

// Answers whether the server spoke HTTP/2, and whether it went on with the session.
function connect({ ca, cert, key, version, resumes }) {
  return new Promise((resolve) => {
    const files = { ca: read(ca), cert: read(cert), key: read(key) };
    const connection = http2.connect(`https://${target}`, { ...files, maxVersion: version, session: resumes ? session : undefined });
    const answer = { is_in: false, is_resumed: false };
    connection.socket.on('session', (one) => { session = one; });
    connection.on('error', () => {}); // it was refused
    connection.on('close', () => resolve(answer));
    connection.on('remoteSettings', () => {
      Object.assign(answer, { is_in: true, is_resumed: connection.socket.isSessionReused() });
      connection.ping(() => connection.destroy()); // by its answer the session has come
    });
  });
}

const serialOf = (call) => call.getAuthContext()?.sslPeerCertificate?.serialNumber.toLowerCase() ?? null;

// Answers with the first message, or with the end if there is none. A stream of answers is left then.
function firstAnswer(channel, command, isHeld) {
  return new Promise((resolve) => {
    let isAnswered = false;
    const told = (news) => {
      if (isAnswered) {
        if (isHeld) tell(channel, news);
        return;
      }
      isAnswered = true;
      resolve(news.code ? news : { code: 'OK', message: '', details: '', serial: serialOf(call), answer: news.message });
      if (!isHeld && methods.get(command.method).responseStream) call.cancel();
    };
    const call = begin(channel, command, told, isHeld ? 0 : DEADLINE_MS);
  });
}

function obey(command) {
  const channel = channels.get(command.channel);
  switch (command.do) {
    case 'methods':
      return Object.fromEntries([...methods].map(([name, method]) => [name, fieldPaths(method.requestType.type).map((one) => one.at(-1))]));
    case 'open':
      return open(command);
    case 'connect':
      return connect(command);
    case 'call':
      return firstAnswer(channel, command, false);
    case 'hold':
      return firstAnswer(channel, command, true);
    case 'heard':
      return channel.heard.shift() ?? new Promise((resolve) => { channel.waiting = resolve; });
    default:
      throw new Error(`no such command: ${command.do}`);
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    process.stdout.write(`${JSON.stringify(await obey(JSON.parse(line)))}\n`);
  }
  process.exit(0); // streams that are held keep the process alive
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
