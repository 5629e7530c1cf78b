// Label the cells of tables with much text, whose rows a phone shows as blocks.
const WIDEST = 60; // characters in the longest cells of all columns together

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const rows = [...table.querySelectorAll("tbody tr")].map((row) => [...row.children]);
    const labels = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const longest = labels.map((_, index) => Math.max(...rows.map((row) => row[index]?.textContent.length ?? 0)));
    if (labels.length < 3 || longest.reduce((sum, length) => sum + length, 0) < WIDEST) continue;
    table.classList.add("stacked");
    for (const [index, label] of labels.entries()) {
      for (const row of rows) {
        if (!row[index]) continue;
        if (!row[index].textContent.trim()) row[index].classList.add("empty");
        if (label) row[index].dataset.label = label;
      }
    }
  }
});
