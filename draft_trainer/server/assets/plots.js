// Line plots as SVG. No part of a text is ever parsed as markup: textContent and attributes only.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Round numbers that divide [low, high] into about `count` parts.
function ticks(low, high, count, whole) {
  let step = 10 ** Math.floor(Math.log10((high - low) / count));
  for (const factor of [2, 2.5, 2]) if ((high - low) / step > count) step *= factor;
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return { at: found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// plot(where, {series: [{kind, mark, line, points: [{x, y, below, text}]}], ...}); `below` is how
// far an error bar reaches down. Null y is a gap. Draws again when its size changes.
function plot(where, options) {
  where.options = options;
  if (!where.watched) {
    where.watched = new ResizeObserver(() => draw(where));
    where.watched.observe(where);
  }
  draw(where);
}

function draw(where) {
  const { series, xText, xWhole, empty, readout, zero } = where.options;
  const width = where.clientWidth, height = where.clientHeight;
  const points = series.flatMap((one) => one.points).filter((point) => point.y !== null);
  const root = svg("svg", { width, height, role: "img" });
  where.replaceChildren(root);
  if (!points.length || width < 80) {
    root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, empty));
    return;
  }
  const left = 44, right = 12, top = 10, bottom = 24;
  let [x0, x1] = extent(points.map((p) => p.x));
  let [y0, y1] = extent(points.flatMap((p) => [p.y, p.y - (p.below || 0)]).concat(zero ? [0] : []));
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const margin = (y1 - y0 || Math.abs(y1) * 0.1 || 1) * 0.08;
  [y0, y1] = [y0 - margin, y1 + margin];
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const ys = ticks(y0, y1, Math.max(2, height / 50), false);
  for (const y of ys.at) {
    root.append(svg("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: zero && Math.abs(y) < 1e-9 ? "zero" : "grid" }));
    root.append(svg("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, (Math.abs(y) < 1e-9 ? 0 : y).toFixed(ys.digits)));
  }
  const xs = ticks(x0, x1, Math.max(2, width / 110), xWhole);
  for (const x of xs.at) {
    root.append(svg("text", { x: px(x), y: height - 6, "text-anchor": "middle" }, xText(x)));
  }
  let marked = -Infinity;
  for (const one of series) {
    const group = svg("g", { class: one.kind });
    let path = "", pen = "M";
    for (const point of one.points) {
      if (point.y === null) { pen = "M"; continue; }
      const x = px(point.x), y = py(point.y);
      path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
      if (point.below) group.append(svg("line", { x1: x, x2: x, y1: y, y2: py(point.y - point.below), class: "bar" }));
      if (one.dots) group.append(svg("circle", { cx: x, cy: y, r: one.dots }));
    }
    if (one.line) group.prepend(svg("path", { d: path, class: "line" }));
    const first = one.points.find((point) => point.y !== null);
    if (one.mark && first && px(first.x) - marked > 26) {
      marked = px(first.x);
      const above = py(first.y) - 9 > 10 ? py(first.y) - 9 : py(first.y) + 18;
      group.append(svg("text", { x: marked, y: above, class: "mark", "text-anchor": "middle" }, one.mark));
    }
    root.append(group);
  }
  const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" });
  root.append(cursor);
  root.onpointermove = (event) => {
    const box = root.getBoundingClientRect();
    const [mx, my] = [event.clientX - box.left, event.clientY - box.top];
    const distance = (p) => Math.hypot(px(p.x) - mx, (py(p.y) - my) / 3);
    const nearest = points.reduce((best, p) => (distance(p) < distance(best) ? p : best));
    cursor.setAttribute("x1", px(nearest.x));
    cursor.setAttribute("x2", px(nearest.x));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = nearest.text;
  };
  root.onpointerleave = () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  };
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

// A line without axes; null is a gap.
function sparkline(values, width, height) {
  const root = svg("svg", { width, height });
  const known = values.filter((value) => value !== null);
  if (!known.length) return root;
  const [low, high] = extent(known);
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (value === null) { pen = "M"; return; }
    const x = 1 + (index / Math.max(1, values.length - 1)) * (width - 2);
    const y = high === low ? height / 2 : height - 2 - ((value - low) / (high - low)) * (height - 4);
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
    root.append(svg("circle", { cx: x, cy: y, r: 1.7 }));
  });
  root.append(svg("path", { d: path }));
  return root;
}
