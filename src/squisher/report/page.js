"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (path) => path.split(".").reduce((value, key) => value[key], data);

  // Numbers, as numbers.py writes them.
  const MISSING = "–";
  const thousands = (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ",");
  const trimmed = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);
  const number = (value) => {
    if (value === null) return MISSING;
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(2).split("e");
    const exponent = Number(power);
    if (exponent < -4 || exponent >= 6) return trimmed(mantissa) + "e" + exponent;
    if (exponent < 2) return trimmed(value.toFixed(2 - exponent));
    const digits = mantissa.replace("-", "").replace(".", "") + "0".repeat(exponent - 2);
    return (value < 0 ? "-" : "") + thousands(digits);
  };
  const write = {
    text: (value) => (value === null ? "" : String(value)),
    whole: (value) => (value === null ? MISSING : thousands(String(value))),
    number,
    fixed: (value) => (value === null ? MISSING : value.toFixed(3).replace(/^-(0\.0*)$/, "$1")),
    share: (value) => {
      if (value === null) return MISSING;
      if (value >= 0.9995 && value < 1) return value < 0.999995 ? (100 * value).toFixed(3) + "%" : ">99.999%";
      if (value > 0 && value < 1e-6) return "<0.0001%";
      return number(100 * value) + "%";
    },
  };

  // Tables: all rows are in the data, some of them in the page.
  const names = new Intl.Collator("en", { numeric: true });
  for (const table of document.querySelectorAll("table[data-source]")) {
    const values = at(table.dataset.source);
    const heads = [...table.tHead.rows[0].cells];
    const columns = heads.map((head) => ({ values: values[head.dataset.key], kind: head.dataset.kind }));
    const find = document.querySelector(`[data-filter="${table.id}"]`);
    const status = document.querySelector(`[data-status="${table.id}"]`);
    const more = document.querySelector(`[data-more="${table.id}"]`);
    const step = Number(table.dataset.rows);
    const lower = columns[0].values.map((name) => String(name).toLowerCase());
    const state = { order: lower.map((_, k) => k), shown: step };
    const arrange = (place, direction) => {
      const { values: own, kind } = columns[place];
      const sign = direction === "ascending" ? 1 : -1;
      state.order = lower.map((_, k) => k).sort((a, b) => {
        const [x, y] = [own[a], own[b]];
        if (x === null || y === null) return (x === null) - (y === null) || a - b; // what is not known comes last
        return sign * (kind === "text" ? names.compare(x, y) : x - y) || a - b;
      });
    };
    heads.forEach((head, place) => { if (head.ariaSort && head.ariaSort !== "none") arrange(place, head.ariaSort); });

    const chosen = () => {
      const words = find ? find.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
      return words.length ? state.order.filter((k) => words.every((word) => lower[k].includes(word))) : state.order;
    };
    const draw = () => {
      const rows = chosen();
      const body = document.createElement("tbody");
      for (const k of rows.slice(0, state.shown)) {
        const row = body.insertRow();
        columns.forEach((column, place) => {
          const cell = document.createElement(place ? "td" : "th");
          if (!place) cell.scope = "row";
          cell.className = column.kind;
          const text = write[column.kind](column.values[k]);
          if (place) cell.textContent = text;
          else cell.append(...text.split(/(?<=\.)/).flatMap((part) => [part, document.createElement("wbr")])); // a long name breaks at a dot
          row.append(cell);
        });
      }
      table.tBodies[0].replaceWith(body);
      const total = lower.length;
      if (status) status.textContent = rows.length === total ? `${thousands(String(total))} rows` : `${thousands(String(rows.length))} of ${thousands(String(total))} rows`;
      if (more) more.hidden = rows.length <= state.shown;
    };
    heads.forEach((head, place) => {
      head.querySelector("button").addEventListener("click", () => {
        const { kind } = columns[place];
        const first = kind === "text" ? "ascending" : "descending";
        const other = first === "ascending" ? "descending" : "ascending";
        const next = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((one) => one.setAttribute("aria-sort", one === head ? next : "none"));
        arrange(place, next);
        draw();
      });
    });
    if (find) find.addEventListener("input", () => { state.shown = step; draw(); });
    if (more) more.addEventListener("click", () => { state.shown += 10 * step; draw(); });
  }

  // Sections: a link opens its section, and the one that is read is marked in the navigation.
  const sections = [...document.querySelectorAll("main > section")];
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const open = (id) => {
    const inside = id && document.getElementById(id)?.closest("section");
    if (inside) inside.querySelector("details.fold").open = true;
  };
  addEventListener("hashchange", () => open(decodeURIComponent(location.hash.slice(1))));
  links.forEach((link, id) => link.addEventListener("click", () => open(id)));
  open(decodeURIComponent(location.hash.slice(1)));
  document.querySelectorAll("summary .anchor").forEach((link) => link.addEventListener("click", (event) => event.stopPropagation()));
  const current = () => {
    const read = sections.findLast((one) => one.getBoundingClientRect().top < innerHeight / 3) ?? sections[0];
    links.forEach((link, id) => (id === read?.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  };
  addEventListener("scroll", current, { passive: true });
  current();
  addEventListener("beforeprint", () => document.querySelectorAll("details.fold").forEach((one) => { one.open = true; }));

  // Themes: the system's, unless one was chosen.
  const buttons = [...document.querySelectorAll("[data-theme-choice]")];
  const store = (value) => { try { localStorage.setItem("squisher-theme", value); } catch { /* files may not keep anything */ } };
  const choose = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme)));
  };
  buttons.forEach((button) => button.addEventListener("click", () => { choose(button.dataset.themeChoice); store(button.dataset.themeChoice); }));
  try {
    const kept = localStorage.getItem("squisher-theme");
    if (kept === "light" || kept === "dark") choose(kept);
  } catch { /* the system's theme, then */ }

  // What is under the pointer, or where the arrow keys stand.
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; document.querySelectorAll("svg .on").forEach((one) => one.classList.remove("on")); };

  const describe = (cells, column, row) => {
    const set = cells.dataset;
    if (set.density) {
      const { first_edge: first, step, bins, cells: filled } = at(set.density);
      const found = filled.find((cell) => cell[0] === column && cell[1] === bins - 1 - row);
      if (!found) return "";
      const range = (k) => `${number(10 ** (first + k * step))} to ${number(10 ** (first + (k + 1) * step))}`;
      return `${set.across}: ${range(column)}\n${set.down}: ${range(bins - 1 - row)}\n${write.whole(found[2])} entries`;
    }
    if (!set.source) return "";
    const source = at(set.source);
    const value = source[set.values][row][column];
    const name = `${source[set.columns][column]} · ${source[set.rows][row]}`;
    return value === null ? "" : `${name}\n${write[set.kind](value)}`;
  };
  const place = (cells, x, y) => {
    const box = cells.querySelector(".blank").getBoundingClientRect();
    const [columns, rows] = cells.dataset.count.split(" ").map(Number);
    return [Math.floor(((x - box.left) / box.width) * columns), Math.floor(((y - box.top) / box.height) * rows), columns, rows, box];
  };
  const mark = (cells, column, row) => {
    const blank = cells.querySelector(".blank"), cursor = cells.querySelector(".cursor");
    const [columns, rows] = cells.dataset.count.split(" ").map(Number);
    const [w, h] = [blank.width.baseVal.value / columns, blank.height.baseVal.value / rows];
    for (const [key, value] of Object.entries({ x: column * w, y: row * h, width: w, height: h })) cursor.setAttribute(key, value);
  };

  for (const chart of document.querySelectorAll(".chart")) {
    const cells = chart.querySelector(".cells[data-count]");
    const marks = [...chart.querySelectorAll("[data-tip]")];
    let here = -1;
    let spot = [-1, 0];
    chart.addEventListener("pointermove", (event) => {
      hide();
      const target = event.target.closest("[data-tip]");
      if (target) { target.classList.add("on"); show(target.dataset.tip, event.clientX, event.clientY); return; }
      if (!cells || !event.target.closest(".cells")) return;
      const [column, row, columns, rows] = place(cells, event.clientX, event.clientY);
      if (column < 0 || row < 0 || column >= columns || row >= rows) return;
      const text = describe(cells, column, row);
      if (text) { mark(cells, column, row); show(text, event.clientX, event.clientY); }
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
      if (!step) return;
      if (marks.length) {
        event.preventDefault();
        here = Math.max(0, Math.min(marks.length - 1, here + step[0] + step[1]));
        hide();
        marks[here].classList.add("on");
        const box = marks[here].getBoundingClientRect();
        show(marks[here].dataset.tip, box.left, box.bottom);
      } else if (cells) {
        event.preventDefault();
        const [columns, rows] = cells.dataset.count.split(" ").map(Number);
        const inside = ([x, y]) => x >= 0 && y >= 0 && x < columns && y < rows;
        let next = spot[0] < 0 ? [0, 0] : [spot[0] + step[0], spot[1] + step[1]];
        while (inside(next) && !describe(cells, ...next)) next = [next[0] + (step[0] || (spot[0] < 0 ? 1 : 0)), next[1] + step[1]];
        if (!inside(next)) return;
        spot = next;
        mark(cells, ...spot);
        const box = cells.querySelector(".cursor").getBoundingClientRect();
        chart.scrollLeft += Math.max(0, box.right - chart.getBoundingClientRect().right) + Math.min(0, box.left - chart.getBoundingClientRect().left);
        show(describe(cells, ...spot), box.left, box.bottom);
      }
    });
  }
})();
