// Values under the pointer: the nearest recorded point of every line of a chart.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const { x: label, top, bottom, series } = JSON.parse(svg.dataset.hover);
  const make = (name, attributes) => {
    const element = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return svg.appendChild(element);
  };
  const cursor = make("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  const dots = series.map((s) => make("circle", { class: `dot c${s.colour}`, r: 4.5, visibility: "hidden" }));
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
  const show = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
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
    const box = svg.getBoundingClientRect();
    const left = event.clientX - box.left;
    const room = box.width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, left > box.width / 2 ? left - tip.offsetWidth - 16 : Math.min(left + 16, room))}px`;
  };
  const hide = (hidden) => {
    tip.hidden = hidden;
    for (const mark of [cursor, ...dots]) mark.setAttribute("visibility", hidden ? "hidden" : "visible");
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => hide(true));
}
