// Keyboard shortcuts, the switch between dark and light, and the search that filters while typing.
"use strict";
(() => {
  const root = document.documentElement;
  const search = document.getElementById("search");
  const help = document.getElementById("keys");

  function switchTheme() {
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    document.cookie = `nsq_theme=${root.dataset.theme};path=/;max-age=31536000;samesite=strict`;
    document.dispatchEvent(new CustomEvent("nsq:theme"));
  }

  const rows = () => [...document.querySelectorAll("tbody tr")].filter((row) => row.querySelector("a"));

  function choose(step) {
    const all = rows();
    if (!all.length) return false;
    const at = all.findIndex((row) => row.classList.contains("chosen"));
    const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step))];
    all.forEach((row) => row.classList.toggle("chosen", row === next));
    next.querySelector("a").focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    return true;
  }

  const isTyping = (target) => target.matches("input:not([type=checkbox]), textarea, select");

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = {
      "/": () => { search.focus(); search.select(); },
      "?": () => help.showModal(),
      j: () => choose(1),
      ArrowDown: () => choose(1),
      k: () => choose(-1),
      ArrowUp: () => choose(-1),
      d: switchTheme,
      p: () => document.dispatchEvent(new CustomEvent("nsq:hold")),
      u: () => { const up = document.querySelector("[data-up]"); if (up) location.assign(up.href); },
    }[event.key];
    if (act && act() !== false) event.preventDefault();
  });
  document.addEventListener("focusin", (event) => {
    const row = event.target.closest ? event.target.closest("tbody tr") : null;
    rows().forEach((each) => each.classList.toggle("chosen", each === row));
  });
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", () => help.showModal());

  // The search filters the table of queues while typing. On other pages Enter opens that table.
  let pending = 0;
  if (document.querySelector("table.queues")) {
    search.addEventListener("input", () => {
      clearTimeout(pending);
      pending = setTimeout(() => {
        const address = new URL(location.href);
        address.searchParams.delete("page");
        if (search.value.trim()) address.searchParams.set("q", search.value.trim());
        else address.searchParams.delete("q");
        history.replaceState(null, "", address);
        document.dispatchEvent(new CustomEvent("nsq:address"));
      }, 200);
    });
  }
})();
