// Keeps a page up to date: the server sends the parts of it that have changed, and charts fetch their curves again.
"use strict";

const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]; // of Okabe and Ito
const GROUPS = { training: "#0072b2", validation: "#d55e00" };
const OTHERS = "#b5b5b5"; // curves behind the best ones

const message = document.getElementById("message");
const connection = document.getElementById("connection");
const charts = document.querySelector(".charts");

function say(text) {
  message.textContent = text;
  message.hidden = !text;
}

// Parts of the page

let source = null;

// Only while it is looked at: browsers open no more than six connections to a server, for all their tabs.
function followIfSeen() {
  if (document.visibilityState === "visible" && !source) {
    follow();
  } else if (document.visibilityState !== "visible" && source) {
    source.close();
    source = null;
  }
}

function follow() {
  source = new EventSource("/live" + location.pathname + location.search);
  source.addEventListener("parts", (event) => {
    if (connection.textContent !== "live") say("");
    connection.textContent = "live";
    const { curves, ...parts } = JSON.parse(event.data);
    Object.assign(waiting, parts);
    if (!isPressed) replaceWaiting();
    if (curves !== undefined && charts && curves !== charts.dataset.drawn) {
      charts.dataset.drawn = curves;
      draw();
    }
  });
  source.addEventListener("trouble", (event) => {
    connection.textContent = "";
    say(JSON.parse(event.data));
  });
  source.onerror = () => {
    const isOver = source && source.readyState === EventSource.CLOSED;
    connection.textContent = isOver ? "not connected; open the address that det ui printed" : "not connected; trying again";
  };
}

// Nothing is replaced between pressing and releasing a button or link, which would not be a click then.
const waiting = {};
let isPressed = false;

function replaceWaiting() {
  for (const [name, html] of Object.entries(waiting)) {
    replace(document.getElementById(name), html);
    delete waiting[name];
  }
}

document.addEventListener("pointerdown", () => (isPressed = true));
for (const kind of ["pointerup", "pointercancel"]) {
  document.addEventListener(kind, () => {
    isPressed = false;
    setTimeout(replaceWaiting);
  });
}

function replace(element, html) {
  const log = element.querySelector(".log");
  const wasAtEnd = !log || log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  const before = log ? log.scrollTop : 0;
  element.innerHTML = html;
  const now = element.querySelector(".log");
  if (now) now.scrollTop = wasAtEnd ? now.scrollHeight : before;
}

// Buttons

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-post]");
  if (!button || (button.dataset.question && !confirm(button.dataset.question))) return;
  button.disabled = true;
  say("");
  try {
    const answer = await fetch(button.dataset.post, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: "{}",
    });
    if (!answer.ok) say((await answer.json()).error || answer.statusText);
  } catch (error) {
    say(`The server cannot be reached: ${error.message}`);
  } finally {
    button.disabled = false;
  }
});

// Charts

let isDrawing = false;
let isStale = false;

async function draw() {
  if (isDrawing) {
    isStale = true;
    return;
  }
  isDrawing = true;
  try {
    do {
      isStale = false;
      const answer = await fetch(charts.dataset.curves + location.search);
      if (answer.ok) show(await answer.json());
    } while (isStale);
  } catch (error) {
    connection.textContent = `curves cannot be read: ${error.message}`;
  } finally {
    isDrawing = false;
  }
}

function show(data) {
  choices(data);
  const panels = data.panels.map((panel) => [panel.title, panel.note, curves(panel), axes(panel.x, panel.title)]);
  if (data.scatter) panels.push([`over ${data.hparam}`, "", scatter(data.scatter), axes(data.scatter.x, data.scatter.title, data.scatter.kind)]);
  for (const [title, note, traces, layout] of panels) {
    const figure = figureOf(title);
    figure.querySelector("figcaption").textContent = note;
    Plotly.react(figure.querySelector(".chart"), traces, layout, { displaylogo: false, responsive: true });
  }
}

function figureOf(title) {
  for (const figure of charts.querySelectorAll("figure")) if (figure.dataset.title === title) return figure;
  const figure = document.createElement("figure");
  figure.dataset.title = title;
  figure.append(document.createElement("div"), document.createElement("figcaption"));
  figure.firstChild.className = "chart";
  charts.append(figure);
  return figure;
}

function curves(panel) {
  const traces = panel.curves.map((curve, index) => {
    const isFew = curve.trial !== undefined || curve.name === "validation" || curve.x.length === 1;
    const color = GROUPS[curve.name] || (index < COLORS.length ? COLORS[index] : OTHERS);
    return {
      x: curve.x,
      y: curve.y,
      name: text(curve.name),
      mode: isFew ? "lines+markers" : "lines",
      line: { color, width: index < COLORS.length ? 2 : 1 },
      marker: { size: 4 },
      showlegend: index < COLORS.length,
    };
  });
  return traces.reverse(); // the best one on top
}

function scatter(chart) {
  const { x, y, trials } = chart.points;
  const places = chart.kind === "category" ? x.map(text) : x;
  return [{ x: places, y, text: trials.map((id) => `trial ${id}`), mode: "markers", marker: { color: COLORS[0], size: 7 } }];
}

function axes(x, y, kind = "linear") {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return {
    title: { text: text(y), font: { size: 14 }, x: 0.02, xanchor: "left" },
    margin: { l: 50, r: 10, t: 40, b: 40 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { color: ink },
    modebar: { bgcolor: "transparent", color: line, activecolor: ink },
    legend: { traceorder: "reversed", font: { size: 11 } },
    xaxis: { ...axis, title: { text: text(x), font: { size: 12 } }, type: kind },
    yaxis: axis,
    uirevision: "kept", // where somebody has zoomed to
  };
}

// Plotly takes some HTML for formatting, and a name is a name.
function text(name) {
  return String(name).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("$", "&#36;");
}

function choices(data) {
  let place = charts.querySelector(".choices");
  if (!place) {
    place = document.createElement("div");
    place.className = "choices";
    charts.prepend(place);
  }
  choice(place, "metric", data.metrics, data.metric);
  choice(place, "axis", data.axes, data.axis);
  choice(place, "hparam", data.hparams, data.hparam, "hyperparameter");
}

function choice(place, name, offered, chosen, label = name) {
  if (!offered || offered.length < 2) return;
  let select = place.querySelector(`select[name=${name}]`);
  if (!select) {
    const around = document.createElement("label");
    select = document.createElement("select");
    select.name = name;
    select.addEventListener("change", () => choose(name, select.value));
    around.append(`${label} `, select);
    place.append(around);
  }
  if (JSON.stringify([...select.options].map((option) => option.value)) !== JSON.stringify(offered)) {
    select.replaceChildren(...offered.map((value) => new Option(value, value)));
  }
  select.value = chosen;
}

// What is chosen is part of the address, so that it can be kept and shared.
function choose(name, value) {
  const query = new URLSearchParams(location.search);
  query.set(name, value);
  history.replaceState(null, "", `?${query}`);
  for (const figure of charts.querySelectorAll("figure")) figure.remove();
  draw();
}

if (charts) draw();
document.addEventListener("visibilitychange", followIfSeen);
followIfSeen();
