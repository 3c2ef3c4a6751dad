// Makes the tables of results sortable: a click on a heading sorts by its column, another one in the other direction.

// Numbers first, then texts, then empty cells; a number may have a unit behind it, as in 1.38x.
function key(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replaceAll(",", ""));
  return { text, number, kind: text === "" ? 2 : Number.isNaN(number) ? 1 : 0 };
}

function compare(one, other) {
  return one.kind === 0 ? one.number - other.number : one.text.localeCompare(other.text);
}

function sort(table, column) {
  const headings = [...table.tHead.rows[0].cells];
  const sign = headings[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
  headings.forEach((heading) => heading.removeAttribute("aria-sort"));
  headings[column].setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, by: key(row, column) }));
  rows.sort((a, b) => a.by.kind - b.by.kind || sign * compare(a.by, b.by));
  table.tBodies[0].append(...rows.map(({ row }) => row));
}

if (location.pathname.includes("/results/")) {
  for (const table of document.querySelectorAll("article table")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.classList.add("sortable");
      heading.tabIndex = 0;
      heading.addEventListener("click", () => sort(table, column));
      heading.addEventListener("keydown", ({ key }) => key === "Enter" && sort(table, column));
    });
  }
}
