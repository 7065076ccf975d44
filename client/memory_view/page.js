"use strict";
const root = document.documentElement;
const events = JSON.parse(document.getElementById("data").textContent);
const tooltip = document.getElementById("tooltip");
let view = Object.keys(events)[0];

root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").onclick = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
};

for (const button of document.querySelectorAll("button[data-view]")) {
  button.onclick = () => {
    view = button.dataset.view;
    for (const each of document.querySelectorAll("div[data-view]")) each.hidden = each.dataset.view !== view;
    for (const each of document.querySelectorAll("button[data-view]")) each.setAttribute("aria-pressed", each === button);
    leave();
  };
}

function nearest(x) {
  const rows = events[view];
  let low = 0, high = rows.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= x) low = middle; else high = middle;
  }
  return x - rows[low][0] < rows[high][0] - x ? rows[low] : rows[high];
}

function leave() {
  tooltip.hidden = true;
  for (const cross of document.querySelectorAll(".cross")) cross.setAttribute("visibility", "hidden");
}

for (const chart of document.querySelectorAll("svg.chart")) {
  chart.onmousemove = (move) => {
    const box = chart.getBoundingClientRect();
    const [x, what, when, memory, ...rest] = nearest((move.clientX - box.left) / box.width * chart.viewBox.baseVal.width);
    for (const cross of document.querySelectorAll(".cross")) {
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.setAttribute("visibility", "visible");
    }
    tooltip.replaceChildren();
    const title = document.createElement("b");
    title.textContent = what;
    tooltip.append(title, [when, memory, ...rest.filter(Boolean)].join(" · "));
    tooltip.hidden = false;
    const left = Math.min(move.clientX + 16, innerWidth - tooltip.offsetWidth - 10);
    tooltip.style.left = `${Math.max(left, 10)}px`;
    tooltip.style.top = `${Math.max(move.clientY - tooltip.offsetHeight - 14, 10)}px`;
  };
  chart.onmouseleave = leave;
}
