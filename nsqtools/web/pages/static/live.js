// Updates an open page from one stream of changed pieces. They are patched in place, so that focus,
// selection and scroll position stay. A hidden tab has no stream. The server has escaped the pieces,
// and they are parsed in an inert template, so no script in them can run.
"use strict";
(() => {
  const root = document.documentElement;
  const body = document.body;
  root.classList.add("scripted");
  if (!("live" in body.dataset)) return;

  let stream = null;
  let isHeld = false;
  let isLost = false;
  // The reason why updates are missing.
  let problem = "";
  let sampledAt_ms = sampled();
  // The difference to the server's clock, from the first event, because the page may come from a cache.
  let skew_ms = 0;

  function sampled() {
    const part = document.querySelector('[data-part="status"]');
    return part && part.dataset.sampled ? Number(part.dataset.sampled) * 1000 : null;
  }

  function parse(html) {
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content.firstElementChild;
  }

  function patch(old, made) {
    if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName) {
      old.replaceWith(made);
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== made.nodeValue) old.nodeValue = made.nodeValue;
      return;
    }
    for (const { name, value } of [...made.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      // Details that the reader opened stay open, and the selected row stays selected.
      if (!made.hasAttribute(name) && name !== "open" && name !== "class") old.removeAttribute(name);
      if (name === "class" && !made.hasAttribute("class") && !old.classList.contains("chosen")) old.removeAttribute("class");
    }
    const before = [...old.childNodes];
    const after = [...made.childNodes];
    after.forEach((child, index) => {
      if (index < before.length) patch(before[index], child);
      else old.append(child);
    });
    before.slice(after.length).forEach((child) => child.remove());
  }

  const find = (name) => document.querySelector(`[data-part="${CSS.escape(name)}"]`);

  function apply(change) {
    for (const [name, html] of Object.entries(change.parts)) {
      const old = find(name);
      if (old) patch(old, parse(html));
    }
    for (const [name, order] of Object.entries(change.lists)) {
      const list = document.querySelector(`[data-list="${CSS.escape(name)}"]`);
      if (!list) continue;
      const there = new Map([...list.children].map((child) => [child.dataset.part, child]));
      let at = list.firstElementChild;
      for (const part of order) {
        const child = there.get(part) || (change.parts[part] ? parse(change.parts[part]) : null);
        if (!child) continue;
        there.delete(part);
        if (child === at) at = at.nextElementSibling;
        else if (at && there.size && !order.includes(at.dataset.part)) {
          const gone = at;
          at = at.nextElementSibling;
          there.delete(gone.dataset.part);
          gone.replaceWith(child);
        } else list.insertBefore(child, at);
        if (child === at) at = at.nextElementSibling;
      }
      for (const gone of there.values()) gone.remove();
      // CSS hides the table only if its body is :empty, without whitespace.
      if (!list.firstElementChild) list.textContent = "";
    }
    if (change.point) document.dispatchEvent(new CustomEvent("nsq:point", { detail: change.point }));
    sampledAt_ms = sampled();
    if (change.now_s) skew_ms = Date.now() - change.now_s * 1000;
    age();
  }

  function open() {
    if (stream || isHeld || document.hidden) return;
    const address = new URL(location.href);
    address.searchParams.set("live", "1");
    address.hash = "";
    stream = new EventSource(address);
    stream.addEventListener("pieces", (event) => {
      isLost = false;
      problem = "";
      if (!isHeld) apply(JSON.parse(event.data));
    });
    stream.addEventListener("failed", (event) => {
      isLost = false;
      problem = event.data;
      age();
    });
    stream.onerror = () => {
      isLost = true;
      age();
      if (stream && stream.readyState === EventSource.CLOSED) {
        stream = null;
        setTimeout(open, 3000);
      }
    };
  }

  function close() {
    if (stream) stream.close();
    stream = null;
  }

  function age() {
    const part = find("status");
    if (!part || sampledAt_ms === null) return;
    const age_s = Math.max(0, Math.round((Date.now() - skew_ms - sampledAt_ms) / 1000));
    const isStale = age_s > 3 * (Number(part.dataset.interval) || 2) + 2;
    part.classList.toggle("lost", isLost);
    part.classList.toggle("held", isHeld);
    part.classList.toggle("stale", isStale);
    const text = part.querySelector(".age");
    if (text) {
      const why = isLost ? "connection to nsq web lost, trying again" : isHeld ? "held: p goes on" : problem;
      text.classList.toggle("live-note", isStale || why);
      text.textContent = `${age_s} s ago${why && ", "}${why}`;
    }
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  document.addEventListener("nsq:hold", () => {
    isHeld = !isHeld;
    if (isHeld) close();
    else open();
    age();
  });
  document.addEventListener("nsq:address", () => { close(); open(); });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  setInterval(age, 1000);
  open();
})();
