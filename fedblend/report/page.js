"use strict";
(() => {
  /* A method of the legend hides and shows its lines in all figures of its data set. */
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const line of document.querySelectorAll(`[data-method="${button.dataset.toggle}"]`)) {
        line.style.display = shown ? "" : "none";
      }
    });
  }

  /* Sorting: numbers by value, text alphabetically, missing cells last in both directions. */
  const valueOf = (row, column) => row.cells[column].dataset.value;
  const compare = (a, b, down) => {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    const numbers = !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
    const order = numbers ? Number(a) - Number(b) : a.localeCompare(b);
    return down ? -order : order;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(valueOf(a, column), valueOf(b, column), down));
      table.tBodies[0].append(...rows);
    }));
  }

  /* Copying: a page opened from a file may lack the clipboard API. */
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.body.appendChild(document.createElement("textarea"));
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      await copy(button.parentElement.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
