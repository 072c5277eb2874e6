// The button that changes between light and dark; the system's choice counts until it is pressed.
const theme = document.getElementById("theme");
if (theme) {
  const dark = () => (document.documentElement.dataset.theme
    || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "light" : "dark"; theme.ariaLabel = `change to ${theme.textContent}`; };
  theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; name(); });
  theme.hidden = false;
  name();
}

// A link to a folded part opens it; a button, and printing, open all but the long list of results.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const own = target.querySelector("details");
  for (let part = own || target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  target.scrollIntoView();
};
const unfoldAll = (open) => { for (const part of document.querySelectorAll("details:not(#results details)")) part.open = open; };
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => unfoldAll(true));
for (const button of document.querySelectorAll(".unfold")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = button.textContent === "open all";
    unfoldAll(open);
    button.textContent = open ? "close all" : "open all";
  });
}
unfold();

// Heads of tables sort them: numbers by their value, text by the alphabet, what is missing last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.textContent.trim() || null;
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b);
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.ariaSort = down ? "descending" : "ascending";
      const rows = [...body.rows];
      rows.sort((one, two) => {
        const a = key(one, column), b = key(two, column);
        const missing = a === null || b === null || typeof a !== typeof b;
        return down && !missing ? compare(b, a) : compare(a, b);
      });
      body.append(...rows);
    });
  });
}

// A field above a table hides the rows that do not hold its text.
for (const data of document.querySelectorAll(".data")) {
  const input = data.querySelector("input[type=search]");
  if (!input) continue;
  const rows = [...data.querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    data.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} rows`;
  });
}

// What both kinds of charts share: marks on the drawing and a small box with names and values.
const marks = (svg) => (name, attributes) => {
  const element = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return svg.appendChild(element);
};
const box = (svg) => {
  const tip = svg.parentElement.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const row = (name, value, colour) => {
    const line = tip.appendChild(document.createElement("div"));
    const key = line.appendChild(document.createElement(colour === undefined ? "span" : "b"));
    if (colour !== undefined) key.className = `c${colour}`;
    key.textContent = name;
    line.appendChild(document.createElement("span")).textContent = value;
  };
  const beside = (x) => {
    const width = svg.getBoundingClientRect().width;
    const left = (x / svg.viewBox.baseVal.width) * width;
    const room = width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, left > width / 2 ? left - tip.offsetWidth - 16 : Math.min(left + 16, room))}px`;
  };
  return { tip, row, beside };
};
const inside = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

// Lines: the nearest recorded point of every line under the pointer, or at the place the arrow keys moved to.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const { x: label, top, bottom, series } = JSON.parse(svg.dataset.hover);
  if (!series.length) continue;
  const make = marks(svg);
  const cursor = make("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  const dots = series.map((s) => make("circle", { class: `dot c${s.colour}`, r: 4.5, visibility: "hidden" }));
  const { tip, row, beside } = box(svg);
  const hide = (hidden) => {
    tip.hidden = hidden;
    for (const mark of [cursor, ...dots]) mark.setAttribute("visibility", hidden ? "hidden" : "visible");
  };
  const show = (at) => {
    const nearest = series.map((s) =>
      s.points.reduce((best, p) => (Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best)));
    tip.replaceChildren();
    row(label, nearest[0][2]);
    series.forEach((s, i) => row(s.name, nearest[i][3], s.colour));
    nearest.forEach(([x, y], i) => {
      dots[i].setAttribute("cx", x);
      dots[i].setAttribute("cy", y);
    });
    cursor.setAttribute("x1", nearest[0][0]);
    cursor.setAttribute("x2", nearest[0][0]);
    hide(false);
    beside(nearest[0][0]);
  };
  let index = series[0].points.length - 1;
  const points = series[0].points;
  svg.addEventListener("pointermove", (event) => show(inside(svg, event).x));
  svg.addEventListener("pointerdown", (event) => show(inside(svg, event).x));
  svg.addEventListener("pointerleave", () => hide(true));
  svg.addEventListener("blur", () => hide(true));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.min(points.length - 1, Math.max(0, index + step));
    show(points[index][0]);
  });
}

// Points: the one next to the pointer, or the next one by the arrow keys.
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(svg.dataset.points);
  if (!points.length) continue;
  const ring = marks(svg)("circle", { class: "ring", r: 10, visibility: "hidden" });
  const { tip, row, beside } = box(svg);
  const hide = (hidden) => { tip.hidden = hidden; ring.setAttribute("visibility", hidden ? "hidden" : "visible"); };
  const show = (point) => {
    tip.replaceChildren();
    row(point.name, "", point.colour);
    for (const [name, value] of point.rows) row(name, value);
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    hide(false);
    beside(point.x);
  };
  const near = (event) => {
    const at = inside(svg, event);
    const far = (p) => Math.hypot(p.x - at.x, p.y - at.y);
    const best = points.reduce((a, b) => (far(b) < far(a) ? b : a));
    if (far(best) < 60) show(best); else hide(true);
  };
  let index = -1;
  svg.addEventListener("pointermove", near);
  svg.addEventListener("pointerdown", near);
  svg.addEventListener("pointerleave", () => hide(true));
  svg.addEventListener("blur", () => hide(true));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = (index + step + points.length) % points.length;
    show(points[index]);
  });
}
