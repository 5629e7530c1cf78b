// Label the cells of tables with three columns or more, which a phone shows one below the other.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const labels = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (labels.length < 3) continue;
    table.classList.add("stacked");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, index) => {
        if (!cell.textContent.trim()) cell.classList.add("empty");
        if (labels[index]) cell.dataset.label = labels[index];
      });
    }
  }
});
