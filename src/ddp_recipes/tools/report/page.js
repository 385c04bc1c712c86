"use strict";
// Draws curves and parallel coordinates from the numbers in the page; all texts are set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 250, LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 26;
const probe = document.createElement("div");
probe.innerHTML = "<svg></svg>";
const SVG = probe.firstChild.namespaceURI;

function make(tag, attributes = {}, parent = null, text = null) {
  const inSvg = tag === "svg" || (parent && parent.namespaceURI === SVG);
  const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e12) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function colour(index) { return `var(--c${index % 8})`; }

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

function powers(low, high) {
  const found = [];
  for (let at = Math.ceil(low - 1e-9); at <= high + 1e-9; at++) found.push(at);
  return found.length > 1 ? found : ticks(low, high, 4);
}

// An exponential mean, as if all before the first value were unknown; gaps stay gaps.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return sum / mass;
  });
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; return [low - pad, high + pad]; }
  const pad = (high - low) * 0.04;
  return [low - pad, high + pad];
}

function path(steps, values, x, y) {
  let text = "", pen = false;
  steps.forEach((step, index) => {
    const value = values[index], at = value === null ? null : y(value);
    if (at === null) { pen = false; return; }
    text += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${at.toFixed(1)}`;
    pen = true;
  });
  return text;
}

// The point of a curve that is nearest to a step.
function nearest(line, step) {
  let low = 0, high = line.steps.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (line.steps[mid] < step) low = mid; else high = mid; }
  return Math.abs(line.steps[low] - step) <= Math.abs(line.steps[high] - step) ? low : high;
}

function chart(parent, title, lines, options) {
  const figure = make("figure", {}, parent);
  make("figcaption", {}, figure, title);
  const WIDTH = Math.max(260, Math.round(figure.clientWidth));
  const svg = make("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
    "aria-label": `${title} by step: ${lines.map(line => `${line.name} ends at ${shown(line.values.at(-1))}`).join(", ")}`}, figure);
  const scale = options.log ? value => value > 0 ? Math.log10(value) : null : value => value;
  const drawn = lines.map(line => options.weight ? smoothed(line.values, options.weight) : line.values);
  const [left, right] = bounds(lines.flatMap(line => [line.steps[0], line.steps.at(-1)]));
  const [low, high] = bounds([...lines.flatMap(line => line.values), ...drawn.flat()].map(value => value === null ? null : scale(value)));
  const x = step => LEFT + (step - left) / (right - left) * (WIDTH - LEFT - RIGHT);
  const y = value => { const at = scale(value); return at === null ? null : HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM); };
  for (const at of options.log ? powers(low, high) : ticks(low, high, 4)) {
    const level = HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    make("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: level, y2: level}, svg);
    make("text", {x: LEFT - 6, y: level + 4, "text-anchor": "end"}, svg, shown(options.log ? 10 ** at : at));
  }
  for (const at of ticks(left, right, WIDTH / 90)) if (Number.isInteger(at) && at >= 0) make("text", {x: x(at), y: HEIGHT - 7, "text-anchor": "middle"}, svg, shown(at));
  lines.forEach((line, index) => {
    const stroke = options.colour ? options.colour(line, index) : colour(index);
    if (options.weight) make("path", {class: "curve raw", d: path(line.steps, line.values, x, y), style: `stroke: ${stroke}`}, svg);
    make("path", {class: "curve", d: path(line.steps, drawn[index], x, y), style: `stroke: ${stroke}`}, svg);
    if (line.steps.length === 1 && line.values[0] !== null && y(line.values[0]) !== null) make("circle", {cx: x(line.steps[0]), cy: y(line.values[0]), r: 3, style: `fill: ${stroke}`}, svg);
  });
  const cursor = make("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"}, svg);
  const dots = lines.map((line, index) => make("circle", {r: 3.5, visibility: "hidden", style: `fill: ${options.colour ? options.colour(line, index) : colour(index)}`}, svg));
  const legend = make("div", {class: "legend"}, figure);
  const where = make("span", {class: "small"}, legend);
  const values = lines.map((line, index) => {
    const entry = make("span", {}, legend);
    make("span", {class: "key", style: `background: ${options.colour ? options.colour(line, index) : colour(index)}`}, entry);
    return make("span", {}, entry);
  });
  const say = step => {
    where.textContent = step === null ? "" : `step ${step.toLocaleString("en")}`;
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); }
    lines.forEach((line, index) => {
      const at = step === null ? line.steps.length - 1 : nearest(line, step), value = line.values[at];
      const height = value === null ? null : y(drawn[index][at]);
      const few = line.of > line.steps.length && step === null ? ` (${line.steps.length} of ${line.of.toLocaleString("en")} points)` : "";
      values[index].textContent = `${line.name} ${value === null ? "not finite" : shown(value)}${few}`;
      dots[index].setAttribute("visibility", step === null || height === null ? "hidden" : "visible");
      if (height !== null) { dots[index].setAttribute("cx", x(line.steps[at])); dots[index].setAttribute("cy", height); }
    });
  };
  const all = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  const line = {steps: all};
  let at = null;
  const go = index => { at = index; say(at === null ? null : all[at]); };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const step = left + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
    go(nearest(line, step));
  });
  svg.addEventListener("pointerleave", () => go(null));
  svg.addEventListener("blur", () => go(null));
  svg.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    go(Math.max(0, Math.min(all.length - 1, (at === null ? all.length : at) + move)));
  });
  say(null);
}

// --- the charts of a run, and of a sweep -----------------------------------------------------------------------------

const smooth = document.getElementById("smooth"), log = document.getElementById("log"), metric = document.getElementById("metric");

function options() {
  const weight = smooth ? Number(smooth.value) : 0;
  return {weight, log: log ? log.checked : false};
}

function drawRun() {
  for (const holder of document.querySelectorAll("[data-charts]")) {
    holder.replaceChildren();
    for (const each of data.charts[holder.dataset.charts]) chart(holder, each.title, each.lines, options());
  }
}

// From the best objective to the worst; grey where a run has none.
function shade(objective) {
  const {jobs, direction} = data.sweep, known = jobs.map(job => job.objective).filter(value => value !== null).sort((a, b) => a - b);
  if (objective === null) return "var(--c7)";
  const rank = known.indexOf(objective) / Math.max(1, known.length - 1), share = direction === "max" ? 1 - rank : rank;
  return `hsl(${Math.round(215 - 190 * share)} 75% 52%)`;
}

function objectiveOf(name) {
  const job = data.sweep.jobs.find(job => job.name === name);
  return job ? job.objective : null;
}

function drawComparison() {
  const holder = document.getElementById("comparison");
  if (!holder) return;
  holder.replaceChildren();
  chart(holder, metric.value, data.metrics[metric.value], {...options(), colour: line => shade(objectiveOf(line.name))});
}

// One axis of the parallel coordinates: numbers where all values are, else one place a value.
function axis(values) {
  const present = values.filter(value => value !== null && value !== undefined);
  const numbers = present.map(value => typeof value === "number" ? value : value.trim() === "" ? NaN : Number(value));
  if (numbers.length && numbers.every(Number.isFinite)) {
    const low = Math.min(...numbers), high = Math.max(...numbers), wide = low > 0 && high / low >= 20;
    const scale = wide ? Math.log10 : value => value;
    const place = value => low === high ? 0.5 : (scale(Number(value)) - scale(low)) / (scale(high) - scale(low));
    const few = [...new Set(numbers)].sort((a, b) => a - b);
    const marks = few.length <= 6 ? few : [low, high];
    return {place, marks: marks.map(value => [shown(value), place(value)])};
  }
  const kinds = [...new Set(present)].sort();
  const place = value => kinds.length === 1 ? 0.5 : kinds.indexOf(value) / (kinds.length - 1);
  return {place, marks: kinds.map(value => [String(value), place(value)])};
}

function drawCoordinates() {
  const holder = document.getElementById("coordinates");
  if (!holder) return;
  const {jobs, varied, monitor} = data.sweep;
  const names = [...varied, monitor || "objective"];
  const valueOf = (job, index) => index < varied.length ? job.values[varied[index]] : job.objective;
  const axes = names.map((_, index) => axis(jobs.map(job => valueOf(job, index))));
  const gap = Math.max(150, Math.min(320, (holder.clientWidth - 180) / (names.length - 1)));
  const width = 180 + gap * (names.length - 1), height = 300, top = 34, bottom = 272;
  holder.replaceChildren();
  const box = make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Parallel coordinates"}, holder);
  const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", style: `width: ${width}px`,
    "aria-label": `Parallel coordinates of ${jobs.length} runs; the table above has the same numbers`}, box);
  const x = index => 110 + gap * index, y = share => bottom - share * (bottom - top);
  const rows = jobs.map((_, index) => document.querySelector(`tr[data-job="${index}"]`));
  const paths = jobs.map((job, number) => {
    let text = "", pen = false;
    names.forEach((_, index) => {
      const value = valueOf(job, index);
      if (value === null || value === undefined) { pen = false; return; }
      text += `${pen ? "L" : "M"}${x(index)} ${y(axes[index].place(value)).toFixed(1)}`;
      pen = true;
    });
    const line = make("path", {class: "curve", d: text, style: `stroke: ${shade(job.objective)}`}, svg);
    make("title", {}, line, `${job.name}: ${names.map((name, index) => `${name} ${index < varied.length ? valueOf(job, index) ?? "–" : shown(job.objective)}`).join(", ")}`);
    return line;
  });
  names.forEach((name, index) => {
    make("line", {class: "cursor", x1: x(index), x2: x(index), y1: top, y2: bottom, style: "stroke-dasharray: none"}, svg);
    make("text", {class: "name", x: x(index), y: 16, "text-anchor": "middle"}, svg, name.length > 26 ? `…${name.slice(-25)}` : name);
    let last = Infinity;
    for (const [text, share] of axes[index].marks) {
      if (Math.abs(y(share) - last) < 14) continue;
      last = y(share);
      make("text", {x: x(index) - 6, y: y(share) + 4, "text-anchor": "end"}, svg, text.length > 16 ? `${text.slice(0, 15)}…` : text);
    }
  });
  const stand = number => {
    paths.forEach((line, index) => {
      line.classList.toggle("dim", number !== null && index !== number);
      line.classList.toggle("thick", index === number);
      if (rows[index]) rows[index].classList.toggle("near", index === number);
    });
  };
  [...paths, ...rows].forEach((node, index) => {
    if (!node) return;
    node.onpointerenter = () => stand(index % jobs.length);
    node.onpointerleave = () => stand(null);
  });
}

function sortable(table) {
  const head = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const keyOf = cell => { const number = cell.querySelector("data"); const text = number ? number.value : cell.textContent.trim(); return text === "–" || text === "" ? null : text; };
  head.forEach((cell, column) => {
    const button = make("button", {type: "button"}, null, cell.textContent);
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      head.forEach(other => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map(row => [keyOf(row.cells[column]), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        const order = Number.isFinite(Number(a)) && Number.isFinite(Number(b)) ? a - b : a.localeCompare(b, "en", {numeric: true});
        return down ? -order : order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}

const parts = data.sweep ? [drawComparison, drawCoordinates] : [drawRun];
const draw = () => parts.forEach(part => part());
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
for (const control of [smooth, log, metric]) if (control) control.addEventListener("input", () => {
  document.querySelector("output").textContent = Number(smooth.value).toFixed(2);
  parts[0]();
});
document.querySelectorAll("table.sortable").forEach(sortable);
draw();
let drawn = window.innerWidth, waiting = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawn) return;
  drawn = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(draw, 150);
});
