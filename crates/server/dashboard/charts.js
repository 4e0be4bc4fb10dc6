// Line charts in SVG: drawn once, then only their paths move.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const LEFT = 40;
const BOTTOM = 20;
const TOP = 8;
const MOST_MINUTES = 15;
/** More points than pixels say nothing. */
const MOST_POINTS = 300;

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function roof(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

const short = (n) => (n >= 1e6 ? `${+(n / 1e6).toFixed(1)}M` : n >= 1e3 ? `${+(n / 1e3).toFixed(1)}k` : `${+n.toFixed(1)}`);

/** series: [{ name, kind, of(sample) }] */
export function chart(title, unit, series) {
  const element = document.createElement("section");
  element.className = "card chart";
  const heading = document.createElement("h2");
  heading.textContent = title;
  const plot = svg("svg", { role: "img" });
  const grid = [0, 0.5, 1].map((part) => {
    const y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - part);
    const line = svg("line", { class: "plot-grid", x1: LEFT, y1: y, y2: y });
    const label = svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" });
    plot.append(line, label);
    return { part, line, label };
  });
  const times = [[1, "start"], [2 / 3, "middle"], [1 / 3, "middle"], [0, "end"]].map(([back, anchor]) => {
    const label = svg("text", { y: HEIGHT - 4, "text-anchor": anchor });
    plot.append(label);
    return { back, label };
  });
  let width = 0;
  /** One unit of the drawing is one pixel, so that words keep their size. */
  function fit() {
    const wide = Math.max(200, Math.round(plot.clientWidth || 560));
    if (wide === width) return;
    width = wide;
    plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const { line } of grid) line.setAttribute("x2", width);
    for (const { back, label } of times) label.setAttribute("x", LEFT + (width - LEFT) * (1 - back));
  }
  const lines = series.map((one) => {
    const area = svg("path", { class: `area ${one.kind}` });
    const line = svg("path", { class: `line ${one.kind}` });
    plot.append(area, line);
    return { ...one, area, line };
  });
  const key = document.createElement("ul");
  key.className = "key";
  const words = lines.map((one) => {
    const item = document.createElement("li");
    item.className = `k-${one.kind}`;
    key.append(item);
    return item;
  });
  element.append(heading, plot, key);

  function draw(samples) {
    fit();
    const now = samples.at(-1)?.at_ms ?? Date.now();
    // A young server shows its few minutes, not an empty quarter of an hour.
    const minutes = Math.min(MOST_MINUTES, Math.max(3, Math.ceil((now - (samples[0]?.at_ms ?? now)) / 60_000 / 3) * 3));
    for (const { back, label } of times) label.textContent = back ? `-${Math.round(minutes * back)} min` : "now";
    const step = Math.max(1, Math.ceil(samples.length / MOST_POINTS));
    const shown = samples.filter((_, n) => n % step === 0 || n === samples.length - 1);
    const values = lines.map((one) => shown.map(one.of));
    const top = roof(Math.max(0, ...values.flat()));
    const x = (at) => LEFT + (width - LEFT) * (1 - (now - at) / (minutes * 60_000));
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    lines.forEach((one, n) => {
      const points = shown.map((sample, i) => `${x(sample.at_ms).toFixed(1)} ${y(values[n][i]).toFixed(1)}`);
      const path = points.length ? `M${points.join("L")}` : "";
      one.line.setAttribute("d", path);
      const floor = y(0);
      one.area.setAttribute("d", points.length ? `${path}L${x(shown.at(-1).at_ms).toFixed(1)} ${floor}L${x(shown[0].at_ms).toFixed(1)} ${floor}Z` : "");
      words[n].textContent = `${one.name}: ${short(values[n].at(-1) ?? 0)}${unit}`;
    });
    for (const { part, label } of grid) label.textContent = short(top * part);
    const told = lines.map((one, n) => `${one.name} ${short(values[n].at(-1) ?? 0)}${unit} now, at most ${short(Math.max(0, ...values[n]))}${unit}`);
    plot.setAttribute("aria-label", `${title}, last ${minutes} minutes: ${told.join("; ")}`);
  }
  return { element, draw };
}
