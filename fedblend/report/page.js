"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  /* The figures have colours for a white background; replace them by the page's. */
  const restyled = (figure) => {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const layout = structuredClone(figure.layout);
    const data = structuredClone(figure.data);
    layout.font = { ...layout.font, color: colour("--ink"), family: getComputedStyle(document.body).fontFamily };
    layout.hoverlabel = { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: colour("--accent") };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      layout[name] = { ...layout[name], gridcolor: colour("--grid"), linecolor: colour("--line") };
    }
    for (const trace of data.filter((one) => one.type === "heatmap")) {
      /* Cells with numbers have pale colours, so that the numbers are readable. */
      const written = Boolean(trace.texttemplate);
      trace.colorscale = (written ? ["--heat-0", "--heat-soft"] : ["--heat-0", "--heat-1", "--heat-2"])
        .map((name, i, all) => [i / (all.length - 1), colour(name)]);
      if (written) trace.textfont = { color: colour("--ink") };
    }
    return { data, layout };
  };

  /* Buttons are listed: plotly's default has one that uploads the figure to a cloud. */
  const options = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const draw = () => {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = JSON.parse(document.getElementById(`figure-${place.dataset.figure}`).textContent);
      const { data, layout } = restyled(figure);
      Plotly.react(place, data, layout, { ...options, toImageButtonOptions: { filename: place.dataset.figure, scale: 2 } });
    }
  };
  draw();
  dark.addEventListener("change", draw);

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
