// Keeps a page live: one stream of news, fragments at most twice a second, ages, the keyboard. Without it, all still shows.
"use strict";
(() => {
  const LEAST = 500, SLOW = 5000;
  const root = document.documentElement, live = document.getElementById("live");
  const connection = document.getElementById("connection"), pause = document.getElementById("pause");
  const trouble = document.getElementById("trouble");
  root.classList.add("js");
  let paused = false, asked = 0, timer = 0, isAsking = false, isOwed = false, away = "", stream = null;
  const isLive = live && live.hasAttribute("hx-get");

  const here = document.querySelector(".bar nav [aria-current]");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - (here.parentElement.clientWidth - here.offsetWidth) / 2;

  // --- state ---
  const show = (state, words) => {
    connection.dataset.state = state;
    connection.lastElementChild.textContent = words;
  };
  const tell = (words) => {
    if (away === words) return;
    away = words;
    trouble.textContent = words;
    trouble.hidden = !words;
    if (words) show("away", "away");
    else show(paused ? "paused" : "live", paused ? "paused" : "live");
  };

  // --- fragments ---
  // A region that somebody uses stays as it is: a form is open in it, something in it is selected or being typed.
  const isInUse = () => {
    if (live.querySelector("details[open]")) return true;
    const at = document.activeElement;
    if (at && live.contains(at) && at.matches("input, textarea, select")) return true;
    const chosen = document.getSelection();
    return Boolean(chosen && !chosen.isCollapsed && chosen.anchorNode && live.contains(chosen.anchorNode));
  };
  const ask = () => {
    timer = 0;
    if (!isLive || paused || document.hidden) { isOwed = true; return; }
    if (isAsking || isInUse()) { isOwed = true; return; }
    isOwed = false;
    asked = Date.now();
    isAsking = true;
    htmx.trigger(live, "mtask:refresh");
  };
  const refresh = () => {
    if (!timer) timer = setTimeout(ask, Math.max(0, asked + LEAST - Date.now()));
  };
  const focusPath = () => {
    const at = document.activeElement;
    if (!at || !live.contains(at) || !at.matches("a[href], button, [tabindex]")) return null;
    return at.matches("a[href]") ? `a[href="${CSS.escape(at.getAttribute("href"))}"]` : null;
  };
  let focused = null, scrolled = [];
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.target !== live) return;
    if (isInUse()) { event.detail.shouldSwap = false; isOwed = true; return; }
    focused = focusPath();
    scrolled = [...live.querySelectorAll(".scroll, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target !== live) return;
    [...live.querySelectorAll(".scroll, pre")].forEach((one, index) => {
      if (scrolled[index]) [one.scrollLeft, one.scrollTop] = scrolled[index];
    });
    if (focused) live.querySelector(focused)?.focus({ preventScroll: true });
    age();
    mark();
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.target !== live && event.detail.elt !== live) return;
    isAsking = false;
    const status = event.detail.xhr ? event.detail.xhr.status : 0;
    if (status === 401) location.reload();
    else if (status === 503) tell("The database cannot be reached. This page goes on by itself.");
    else if (status === 0) tell("The server cannot be reached. This page goes on by itself.");
    else tell("");
    if (isOwed) refresh();
  });

  // --- news ---
  const listen = () => {
    stream = new EventSource("/live");
    stream.addEventListener("open", () => { if (!away) show(paused ? "paused" : "live", paused ? "paused" : "live"); refresh(); });
    stream.addEventListener("tick", (event) => {
      const news = JSON.parse(event.data);
      document.dispatchEvent(new CustomEvent("mtask:rows", { detail: news.rows }));
      const own = live && live.querySelector("[data-task]");
      if (own && !news.many && !news.ids.includes(own.dataset.task)) return;
      connection.classList.add("beat");
      setTimeout(() => connection.classList.remove("beat"), 250);
      refresh();
    });
    stream.addEventListener("rows", (event) => {
      document.dispatchEvent(new CustomEvent("mtask:rows", { detail: JSON.parse(event.data).rows }));
    });
    stream.addEventListener("away", () => tell("The database cannot be reached. This page goes on by itself."));
    stream.addEventListener("error", () => {
      if (!away) show("away", "connecting");
      if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
      refresh();
    });
  };
  const setPaused = (wanted) => {
    paused = wanted;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    if (!away) show(paused ? "paused" : "live", paused ? "paused" : "live");
    document.dispatchEvent(new CustomEvent("mtask:paused", { detail: paused }));
    if (!paused) refresh();
  };
  if (isLive) {
    pause.addEventListener("click", () => setPaused(!paused));
    document.addEventListener("visibilitychange", () => { if (!document.hidden && isOwed) refresh(); });
    document.addEventListener("toggle", () => { if (isOwed) refresh(); }, true);
    setInterval(refresh, SLOW);
    listen();
    addEventListener("pagehide", () => stream.close());
    addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  } else {
    pause.hidden = true;
  }

  // --- ages ---
  const unit = (seconds) => {
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 60) return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
    const pairs = [[60, "min", 1, "s", 3600], [3600, "h", 60, "min", 86400], [86400, "d", 3600, "h", Infinity]];
    const [size, big, next, small] = pairs.find((one) => seconds < one[4]);
    const rest = Math.floor((seconds % size) / next);
    return `${Math.floor(seconds / size)} ${big}${rest ? ` ${rest} ${small}` : ""}`;
  };
  // The ages that the server wrote tell how far this clock is from its own.
  let skew = null;
  const age = () => {
    for (const one of document.querySelectorAll("time[data-ago]")) {
      const seconds = (Date.now() - Date.parse(one.dateTime)) / 1000 - (skew || 0);
      one.textContent = seconds < -0.5 ? `in ${unit(-seconds)}` : seconds < 1.5 ? "now" : `${unit(Math.floor(seconds))} ago`;
    }
  };
  fetch("/charts", { headers: { Accept: "application/json" } })
    .then((answer) => (answer.ok ? answer.json() : null))
    .then((found) => {
      if (!found) return;
      skew = (Date.now() - found.now) / 1000;
      document.dispatchEvent(new CustomEvent("mtask:history", { detail: found }));
    })
    .catch(() => {});
  setInterval(() => { if (!paused && !document.hidden) age(); }, 1000);

  // --- the keyboard ---
  let isGoing = false, at = -1;
  const rows = () => [...document.querySelectorAll("tbody tr:has(a[href])")];
  const mark = () => rows().forEach((row, index) => row.classList.toggle("at", index === at));
  const step = (by) => {
    const all = rows();
    if (!all.length) return;
    at = Math.min(all.length - 1, Math.max(0, at + by));
    mark();
    all[at].querySelector("a[href]").focus({ preventScroll: true });
    all[at].scrollIntoView({ block: "nearest" });
  };
  const help = document.getElementById("help");
  document.getElementById("keys")?.addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.key === "Escape") {
      document.querySelectorAll("details.sure[open], details.menu[open]").forEach((one) => { one.open = false; one.querySelector("summary").focus(); });
      return;
    }
    if (event.target.matches("input, textarea, select")) return;
    if (isGoing) {
      isGoing = false;
      const link = document.querySelector(`.bar nav a[data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); location.href = link.href; }
      return;
    }
    const act = {
      g: () => { isGoing = true; setTimeout(() => { isGoing = false; }, 1500); },
      "/": () => document.querySelector("#filter input:not([type=checkbox])")?.focus(),
      j: () => step(1), k: () => step(-1), p: () => isLive && setPaused(!paused), "?": () => help.showModal(),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.addEventListener("click", (event) => {
    document.querySelectorAll("details.sure[open], details.menu[open]").forEach((one) => { if (!one.contains(event.target)) one.open = false; });
  });
})();
