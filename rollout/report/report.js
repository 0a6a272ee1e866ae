"use strict";
// Draws the charts as wide as they are shown, opens rows, and sorts tables.

function drawAll() {
  for (const svg of document.querySelectorAll("svg.chart")) {
    drawChart(svg, JSON.parse(svg.parentElement.querySelector("script").textContent));
  }
}

let drawnAt = 0;
addEventListener("resize", () => {
  if (innerWidth !== drawnAt) drawAll();
  drawnAt = innerWidth;
});
drawAll();
drawnAt = innerWidth;

// The largest first, then the other way round. Every row with what it opens to is a tbody of its
// own. What is unknown stays last.
function sortTable(table, column, direction) {
  const sign = direction === "ascending" ? 1 : -1;
  const key = (body) => body.rows[0].cells[column].dataset.value;
  const compare = (one, other) => {
    const [a, b] = [key(one), key(other)];
    if ((a === "nan") !== (b === "nan")) return a === "nan" ? 1 : -1;
    const [x, y] = [Number(a), Number(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return sign * a.localeCompare(b);
    return sign * (x - y);
  };
  table.append(...[...table.tBodies].sort(compare));
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    if (index === column) cell.setAttribute("aria-sort", direction);
    else cell.removeAttribute("aria-sort");
  });
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    cell.firstElementChild.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") !== "descending";
      sortTable(table, index, down ? "descending" : "ascending");
    });
  });
  table.addEventListener("click", (event) => {
    const body = event.target.closest("tbody");
    if (!body?.rows[1] || event.target.closest(".opened")) return;
    body.rows[1].hidden = !body.rows[1].hidden;
    body.querySelector("button").setAttribute("aria-expanded", String(!body.rows[1].hidden));
  });
}
