"use strict";
// Charts of the report and of the status page, as SVG. A chart is drawn as wide as it is shown, so
// that text keeps its size. All text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { right: 16, top: 8, bottom: 34 };
const LETTER = 6.4; // pixels of a letter on average
const ROW = 15; // pixels of a span, and of a line of the legend

function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

// An axis maps values to [0, 1] and names round ones.
function linearAxis({ from, to }, most) {
  const span = to - from || 1;
  const unit = 10 ** Math.floor(Math.log10(span / most));
  const step = unit * [1, 2, 5, 10].find((times) => span / (times * unit) <= most);
  const ticks = [];
  for (let k = Math.ceil(from / step); k * step <= to + step * 1e-9; k++) ticks.push(k * step);
  return { at: (value) => (value - from) / span, ticks, name: short };
}

function logAxis({ from, to }, most) {
  const span = Math.log(to / from) || 1;
  const ticks = [];
  for (let decade = Math.floor(Math.log10(from)); 10 ** decade <= to; decade++) {
    const steps = span < Math.log(300) ? [1, 2, 5] : [1];
    ticks.push(...steps.map((step) => step * 10 ** decade));
  }
  let within = ticks.filter((tick) => tick >= from * 0.999 && tick <= to * 1.001);
  if (within.length < 2) within = linearAxis({ from, to }, most).ticks;
  return { at: (value) => Math.log(value / from) / span, ticks: within, name: short };
}

function namesAxis({ names }) {
  const at = (index) => (index + 0.5) / names.length;
  return { at, ticks: names.map((_, index) => index), name: (index) => names[index] };
}

// `most`: ticks, where they can be chosen.
const axisOf = (axis, most) => (axis.names ? namesAxis : axis.log ? logAxis : linearAxis)(axis, most);

// Draws a chart into an empty or an earlier SVG.
//   x, y: {from, to, log}, or {names} of rows or columns 0, 1, ...
//   lines: {label, points: [[x, y, low, high]], series, dashed, dots}; low and high make a band
//   marks: {label, points: [[x, y, tip, low, high]], series, small}; low and high make a whisker
//   spans: {points: [[from, to, tip]], series}, one in each row of y
//   cells: {points: [[column, row, tip, opacity]], series}, of an x and a y with names
// A line is broken where a point is not finite.
function drawChart(svg, { x, y, lines = [], marks = [], spans = [], cells = [], xLabel = "", yLabel = "", height = 200 }) {
  const width = Math.max(240, svg.clientWidth || 320);
  const [xAxis, yAxis] = [axisOf(x, width > 600 ? 10 : 5), axisOf(y, 5)];
  const nameWidth = Math.max(...yAxis.ticks.map((tick) => yAxis.name(tick).length), 3) * LETTER;
  const left = Math.min(nameWidth + 12, width / 3);
  const labels = legend([...lines, ...marks], width - left - MARGIN.right);
  const top = MARGIN.top + (labels.length ? (labels.at(-1).row + 1) * ROW + 4 : 0);
  if (y.names) height = top + y.names.length * ROW + MARGIN.bottom;
  const toX = (value) => left + xAxis.at(value) * (width - left - MARGIN.right);
  const upwards = (value) => height - MARGIN.bottom - yAxis.at(value) * (height - top - MARGIN.bottom);
  const toY = y.names ? (row) => top + (row + 0.5) * ROW : upwards;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  if (yLabel) svg.setAttribute("aria-label", yLabel);
  for (const tick of yAxis.ticks) {
    if (!y.names) shape(svg, "line", { class: "grid", x1: left, x2: width - MARGIN.right, y1: toY(tick), y2: toY(tick) });
    shape(svg, "text", { x: left - 6, y: toY(tick) + 4, "text-anchor": "end" }, yAxis.name(tick));
  }
  const widest = Math.max(...xAxis.ticks.map((tick) => xAxis.name(tick).length), 1) * LETTER + 12;
  const every = Math.ceil((xAxis.ticks.length * widest) / (width - left));
  xAxis.ticks.filter((_, index) => index % every === 0).forEach((tick) => {
    shape(svg, "text", { x: toX(tick), y: height - MARGIN.bottom + 14, "text-anchor": "middle" }, xAxis.name(tick));
  });
  shape(svg, "text", { x: width - MARGIN.right, y: height - 5, "text-anchor": "end" }, xLabel);
  for (const { label, row, at, series } of labels) {
    shape(svg, "text", { class: `series-${series}`, x: left + at, y: MARGIN.top + row * ROW + 6 }, label);
  }
  lines.forEach((line, index) => drawLine(svg, line, line.series ?? index, toX, toY));
  marks.forEach((each, index) => drawMarks(svg, each, each.series ?? index, toX, toY));
  spans.forEach(({ points, series = 0 }) => points.forEach(([from, to, tip], row) => {
    const length = Math.max(toX(to) - toX(from), 2);
    const bar = { x: toX(from), y: toY(row) - ROW / 2 + 2, width: length, height: ROW - 4, rx: 2 };
    shape(svg, "rect", { class: `span series-${series}`, ...bar }).dataset.tip = tip;
  }));
  cells.forEach(({ points, series = 0 }) => points.forEach(([column, row, tip, opacity]) => {
    const length = (width - left - MARGIN.right) / x.names.length;
    const cell = { x: toX(column) - length / 2, y: toY(row) - ROW / 2 + 1, width: Math.max(length - 1, 1), height: ROW - 2 };
    shape(svg, "rect", { class: `span series-${series}`, "fill-opacity": opacity, ...cell }).dataset.tip = tip;
  }));
  const rule = shape(svg, "line", { class: "rule", y1: top, y2: height - MARGIN.bottom, visibility: "hidden" });
  svg.hover = { lines, toX, rule, xLabel, scale: () => width / svg.clientWidth };
}

// Where the labels stand: row by row, each cut to the width. A lone series needs none.
function legend(all, width) {
  const shown = all.map(({ label, series }, index) => ({ label, series: series ?? index })).filter(({ label }) => label);
  if (shown.length < 2) return [];
  let [row, at] = [0, 0];
  return shown.map(({ label, series }) => {
    const text = label.slice(0, Math.floor(width / LETTER));
    const length = text.length * LETTER + 16;
    if (at > 0 && at + length > width) [row, at] = [row + 1, 0];
    at += length;
    return { label: text, series, row, at: at - length };
  });
}

function drawLine(svg, { label = "", points, dashed, dots }, series, toX, toY) {
  const group = shape(svg, "g", { class: `series-${series}`, "data-label": label });
  const corner = ([px, py]) => `${toX(px).toFixed(1)},${toY(py).toFixed(1)}`;
  for (const run of unbroken(points)) {
    if (run.every(([, , low, high]) => Number.isFinite(low) && Number.isFinite(high))) {
      const edge = [...run.map(([px, , low]) => [px, low]), ...run.map(([px, , , high]) => [px, high]).reverse()];
      shape(group, "polygon", { class: "band", points: edge.map(corner).join(" ") });
    }
    shape(group, "polyline", { class: dashed ? "dashed" : "solid", points: run.map(corner).join(" ") });
    if (!dots && run.length > 1) continue;
    for (const [px, py] of run) shape(group, "circle", { class: "dot", cx: toX(px), cy: toY(py), r: 3 });
  }
}

function drawMarks(svg, { label = "", points, small }, series, toX, toY) {
  const group = shape(svg, "g", { class: `series-${series}`, "data-label": label });
  for (const [px, py, tip, low, high] of points) {
    if (Number.isFinite(low)) shape(group, "line", { class: "whisker", x1: toX(px), x2: toX(px), y1: toY(low), y2: toY(high) });
    const mark = shape(group, "circle", { class: small ? "faint" : "mark", cx: toX(px), cy: toY(py), r: small ? 2 : 4 });
    if (tip) mark.dataset.tip = tip;
  }
}

function unbroken(points) {
  const runs = [[]];
  for (const point of points) {
    if (Number.isFinite(point[0]) && Number.isFinite(point[1])) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

// A tip beside the pointer: that of the mark under it, or what the lines are worth there.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function lineTip(svg, pointer) {
  const { lines, toX, rule, xLabel, scale } = svg.hover;
  const px = (pointer.clientX - svg.getBoundingClientRect().left) * scale();
  const nearest = lines.map(({ points }) => points.filter(([at, py]) => Number.isFinite(at) && Number.isFinite(py))
    .reduce((best, point) => (!best || Math.abs(toX(point[0]) - px) < Math.abs(toX(best[0]) - px) ? point : best), null));
  const distances = nearest.map((point) => (point ? Math.abs(toX(point[0]) - px) : Infinity));
  const least = Math.min(...distances);
  if (least > 60) return "";
  const at = nearest[distances.indexOf(least)][0];
  rule.setAttribute("x1", toX(at));
  rule.setAttribute("x2", toX(at));
  rule.setAttribute("visibility", "visible");
  const told = nearest.flatMap((point, index) => {
    if (distances[index] > least + 12) return [];
    const [, value, low, high] = point;
    const range = Number.isFinite(low) ? ` (${short(low)} to ${short(high)})` : "";
    return [`${lines[index].label}${lines[index].label ? ": " : ""}${short(value)}${range}`];
  });
  return [`${short(at)} ${xLabel}`, ...told].join("\n");
}

function showTip(event) {
  const target = event.target instanceof Element ? event.target : document.body;
  const svg = target.closest("svg");
  for (const rule of document.querySelectorAll("svg .rule")) rule.setAttribute("visibility", "hidden");
  const text = target.closest("[data-tip]")?.dataset.tip ?? (svg?.hover ? lineTip(svg, event) : "");
  tip.hidden = !text;
  tip.textContent = text;
  if (!text) return;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
}

for (const kind of ["pointermove", "pointerdown"]) addEventListener(kind, showTip);
document.documentElement.addEventListener("pointerleave", () => { tip.hidden = true; });
