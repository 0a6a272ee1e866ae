"use strict";
// Lines in an SVG. Coordinates are those of its viewBox, which is as wide as it is shown, so that
// text keeps its size.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 46, right: 16, top: 16, bottom: 32 };
const NUM_COLORS = 6;

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
function linearAxis(low, high) {
  const span = high - low || 1;
  const unit = 10 ** Math.floor(Math.log10(span / 4));
  const step = unit * [1, 2, 5, 10].find((times) => span / (times * unit) <= 5);
  const ticks = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return { at: (value) => (value - low) / span, ticks };
}

function logAxis(low, high) {
  const span = Math.log(high / low) || 1;
  const ticks = [];
  for (let decade = Math.floor(Math.log10(low)); 10 ** decade <= high; decade++) {
    const steps = span < Math.log(300) ? [1, 2, 5] : [1];
    ticks.push(...steps.map((step) => step * 10 ** decade));
  }
  const within = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return { at: (value) => Math.log(value / low) / span, ticks: within };
}

// lines: [{label, points: [[x, y]], seen: [bool] or absent}]. A point that is not finite breaks its
// line. ring: [x, y] or absent.
function drawChart(svg, { lines, xAxis, yAxis, xLabel, height, ring, tick = short }) {
  const width = Math.max(240, svg.clientWidth || 320);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  const x = (value) => MARGIN.left + xAxis.at(value) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - yAxis.at(value) * (height - MARGIN.top - MARGIN.bottom);
  for (const value of yAxis.ticks) {
    shape(svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) });
    shape(svg, "text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value));
  }
  const most = Math.floor((width - MARGIN.left) / 44);
  const every = Math.ceil(xAxis.ticks.length / most);
  xAxis.ticks.filter((_, index) => index % every === 0).forEach((value) => {
    shape(svg, "text", { x: x(value), y: height - MARGIN.bottom + 14, "text-anchor": "middle" }, tick(value));
  });
  shape(svg, "text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, xLabel);
  let labelAt = MARGIN.left + 4;
  lines.forEach((line, index) => {
    const group = shape(svg, "g", { class: `series-${index % NUM_COLORS}`, "data-label": line.label });
    for (const run of unbroken(line.points)) {
      const points = run.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
      shape(group, "polyline", { points });
    }
    line.points.forEach(([px, py], at) => {
      if (line.seen?.[at]) shape(group, "circle", { class: "dot", cx: x(px), cy: y(py), r: 3 });
    });
    if (lines.length === 1) return;
    shape(svg, "text", { class: `series-${index % NUM_COLORS}`, x: labelAt, y: 10 }, line.label);
    labelAt += 7 * line.label.length + 10;
  });
  if (ring) shape(svg, "circle", { class: "ring", cx: x(ring[0]), cy: y(ring[1]), r: 5 });
}

function unbroken(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.every(Number.isFinite)) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}
