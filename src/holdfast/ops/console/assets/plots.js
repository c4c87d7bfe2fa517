// Plots as SVG: lines over time, and columns. Colours are classes, so that both themes have their own.

import { count, duration, h } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 480;
const HEIGHT = 200;
const LEFT = 56;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 26;
const POINTS_MAX = 160;

function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

function title(text) {
  return svg("title", {}, text);
}

function text(x, y, anchor, content) {
  return svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, content);
}

// Round numbers from 0 to one at or above the largest value.
export function ticks(most) {
  if (!(most > 0)) return [0, 1];
  const scale = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((by) => by * scale).find((one) => one >= (most / 4) * 0.999);
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, at) => step * at);
}

function axis(marks, y, format) {
  return marks.flatMap((mark) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark).toFixed(1), y2: y(mark).toFixed(1) }),
    text(LEFT - 6, y(mark) + 4, "end", format(mark)),
  ]);
}

function figure(name, note, parts, height = HEIGHT) {
  return h("figure", {}, h("figcaption", {}, h("b", {}, name), " ", h("span", { class: "quiet" }, note)),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${name}: ${note}`, class: "plot" }, ...parts));
}

function thinned(values) {
  if (values.length <= POINTS_MAX) return values;
  return Array.from({ length: POINTS_MAX }, (_, at) => values[Math.round((at * (values.length - 1)) / (POINTS_MAX - 1))]);
}

// `lines` are `{label, tone, of}`; `of` gives the value of a point. Stacked lines lie on the line below.
export function linePlot(name, all, lines, { seconds, format = shortCount, stacked = false, note }) {
  const points = thinned(all);
  const from = seconds(points[0]);
  const to = Math.max(seconds(points.at(-1)), from + 1e-3);
  const curves = lines.map((line) => points.map((point) => Number(line.of(point))));
  if (stacked) curves.forEach((curve, at) => at && curve.forEach((_, n) => { curve[n] += curves[at - 1][n]; }));
  const marks = ticks(Math.max(...curves.flat()));
  const x = (value) => LEFT + ((value - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / marks.at(-1)) * (HEIGHT - TOP - BOTTOM);
  const at = (point, value) => `${x(seconds(point)).toFixed(1)},${y(value).toFixed(1)}`;
  const parts = axis(marks, y, format);
  for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    parts.push(text(LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM + 17, anchor, duration(from + share * (to - from))));
  }
  for (let n = lines.length - 1; n >= 0; n -= 1) {
    const upper = points.map((point, index) => at(point, curves[n][index]));
    const lower = points.map((point, index) => at(point, stacked && n ? curves[n - 1][index] : 0)).reverse();
    parts.push(svg("polygon", { class: `area ${lines[n].tone}`, points: [...upper, ...lower].join(" ") }, title(lines[n].label)));
    parts.push(svg("polyline", { class: `line ${lines[n].tone}`, points: upper.join(" ") }));
  }
  const last = lines.map((line) => `${format(Number(line.of(points.at(-1))))} ${line.label}`.trim()).join(", ");
  return figure(name, note ?? last, parts);
}

// `columns` are `{label, value, title}`.
export function columnPlot(name, columns, { tone, note }) {
  const marks = ticks(Math.max(...columns.map((one) => one.value)));
  const slot = (WIDTH - LEFT - RIGHT) / columns.length;
  const every = Math.max(1, Math.ceil(columns.length / Math.floor((WIDTH - LEFT - RIGHT) / 52)));
  const y = (value) => HEIGHT - BOTTOM - (value / marks.at(-1)) * (HEIGHT - TOP - BOTTOM);
  const parts = axis(marks, y, shortCount);
  columns.forEach((one, at) => {
    const left = LEFT + at * slot;
    parts.push(svg("rect", {
      class: `column ${tone}`, x: (left + 1.5).toFixed(1), y: y(one.value).toFixed(1),
      width: Math.max(1, slot - 3).toFixed(1), height: Math.max(0, HEIGHT - BOTTOM - y(one.value)).toFixed(1),
    }, title(one.title)));
    if (at % every === 0) parts.push(text(left + slot / 2, HEIGHT - BOTTOM + 17, "middle", one.label));
  });
  return figure(name, note, parts);
}

export function shortCount(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toFixed(1).replace(/\.0$/, "")}${unit}`;
  }
  return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(3)));
}

export function microseconds(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(2))} s`;
  return value >= 1e3 ? `${Number((value / 1e3).toPrecision(2))} ms` : `${value} µs`;
}
