// Keeps the page of a run up to date from the server's events; in a report it only answers clicks.
"use strict";

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(byId("facts").textContent);
const pictures = JSON.parse(byId("pictures").textContent);

const model = (name) => {
  for (const shown of window.Bokeh?.documents ?? []) {
    const found = shown.get_model_by_name(name);
    if (found) return found;
  }
  return null;
};

let loaded; // when the script of the pictures is there
let lossFormatter;
const roots = {}; // ids of the figures, by place
async function draw(items) {
  await loaded;
  for (const place of Object.keys(items)) {
    for (const shown of Bokeh.documents) if (shown.get_model_by_id(roots[place])) shown.clear();
    byId(place).replaceChildren();
    roots[place] = items[place].root_id;
  }
  await Promise.all(Object.values(items).map((item) => Bokeh.embed.embed_item(item)));
  lossFormatter = model("losses").below[0].formatter;
  setLossAxis();
  for (const legend of model("losses").above) legend.ncols = Math.max(1, Math.floor(innerWidth / 150));
  for (const name of ["losses", "round bars"]) { // on a phone, times beside each other would overlap
    for (const axis of model(name).below) axis.ticker.desired_num_ticks = Math.min(6, Math.ceil(innerWidth / 150));
  }
  if (!items["version-map"]) return;
  setColouring();
  model("version map").on_event("tap", (event) => showVersion(facts.fragments[Math.round(event.y)], Math.round(event.x)));
}

function setLossAxis() {
  const axis = byId("loss-axis").value;
  const plot = model("losses");
  for (const renderer of plot.renderers) renderer.glyph.x = { field: axis };
  const formats = axis === "time" ? lossFormatter : new (Bokeh.Models.get("NumeralTickFormatter"))({ format: "0.[0]a" });
  plot.below[0].formatter = formats;
}

const images = { contributors: 1, staleness: 1, bytes: 1 };
function setColouring() {
  const name = byId("colouring").value;
  const values = model("versions").data[name][0];
  let high = images[name];
  for (const value of values) if (value > high) high = value;
  model("version colours").high = images[name] = high;
  model("version image").glyph.image = { field: name };
}

// [row, version, contributors, staleness, bytes]
function setCells(cells) {
  const source = model("versions");
  const names = Object.keys(images);
  const width = source.data.dw[0];
  const first = source.data.x[0] + 0.5;
  let newest = 0;
  for (const [row, version, ...values] of cells) {
    if (version - first >= width) return void location.reload(); // the map is full: a new one has more room
    names.forEach((name, index) => {
      source.data[name][0][row * width + version - first] = values[index];
      images[name] = Math.max(images[name], values[index]);
    });
    newest = Math.max(newest, version);
  }
  model("version colours").high = images[byId("colouring").value];
  source.change.emit();
  const range = model("version map").x_range;
  if (newest + 1.5 > range.end) {
    range.start += newest + 1.5 - range.end;
    range.end = newest + 1.5;
  }
}

async function showVersion(fragment, version) {
  if (fragment === undefined || version < 0) return;
  const key = `${fragment}/${version}`;
  let html;
  if (facts.is_report) {
    html = byId(`version/${key}`)?.innerHTML ?? `<p>The report has no details of ${fragment} version ${version}.</p>`;
  } else {
    const answer = await fetch(`/runs/${facts.run}/versions/${key}`);
    html = await answer.text();
  }
  byId("version-facts").innerHTML = html;
  const dialogue = byId("version-dialogue");
  if (!dialogue.open) dialogue.showModal();
}

async function showEvents(page) {
  const words = encodeURIComponent(byId("event-words").value);
  const answer = await fetch(`/runs/${facts.run}/log?words=${words}&page=${page}`);
  byId("event-page").innerHTML = await answer.text();
}

async function act(button) {
  if (!confirm(button.dataset.confirm)) return;
  const answer = await fetch(`/runs/${facts.run}/actions/${button.dataset.action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Skerry-Console": "1" },
    body: JSON.stringify({ ...button.dataset, assignments: byId("assignments").value }),
  });
  alert(await answer.text());
}

async function apply(change) {
  if (change.reload) return void location.reload();
  for (const [id, html] of Object.entries(change.sections ?? {})) {
    let place = byId(id);
    if (!place) {
      place = document.createElement("div");
      place.id = id;
      byId("cards").append(place);
    }
    place.innerHTML = html;
  }
  if (change.pictures) await draw(change.pictures);
  for (const [name, columns] of Object.entries(change.points ?? {})) model(name)?.stream(columns, 2000);
  for (const [name, columns] of Object.entries(change.columns ?? {})) {
    const source = model(name);
    if (source) source.data = columns;
  }
  if (change.cells?.length) setCells(change.cells);
  if (change.sections && byId("event-words").value === "" && change.events) byId("event-page").innerHTML = change.events;
}

function follow() {
  const source = new EventSource(`/runs/${facts.run}/changes?feed=${facts.feed}`);
  let applied = Promise.resolve();
  source.onmessage = (message) => { applied = applied.then(() => apply(JSON.parse(message.data))); };
  source.onerror = () => { byId("headline").textContent = "The console does not answer; trying again."; };
}

if (facts.is_report) {
  draw(pictures);
} else {
  const script = document.createElement("script");
  script.src = "/static/bokeh.min.js";
  loaded = new Promise((resolve) => { script.onload = resolve; });
  requestAnimationFrame(() => setTimeout(() => { // once the page is painted
    document.body.append(script);
    follow();
  }));
}

byId("loss-axis").onchange = setLossAxis;
byId("colouring").onchange = setColouring;
byId("only-problems").onchange = (event) => byId("cards").classList.toggle("only-problems", event.target.checked);
byId("version-form").onsubmit = (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  showVersion(form.get("fragment"), Number(form.get("version")));
};
byId("event-words").oninput = () => (facts.is_report ? filterEvents() : showEvents(0));
document.addEventListener("click", (event) => {
  if (event.target.dataset.page !== undefined) showEvents(Number(event.target.dataset.page));
  if (event.target.dataset.action !== undefined) act(event.target);
});

function filterEvents() {
  const words = byId("event-words").value.toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll("#event-page tbody tr")) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  }
}
