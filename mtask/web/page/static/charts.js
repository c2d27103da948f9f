// The charts of the overview: starts and ends per second, and how late tasks started.
"use strict";
(() => {
  // The charts show what is known of the last minutes, in seconds.
  const LENGTH = 300, SHORTEST = 60;
  const rate = document.getElementById("chart-rate"), late = document.getElementById("chart-late");
  if (!rate || !window.uPlot) return;
  const seconds = new Map();
  let skew = 0, isPaused = false;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const now = () => Math.floor((Date.now() - skew) / 1000);
  const rows = () => {
    const end = now(), made = [[], [], [], [], [], []], first = Math.min(...seconds.keys());
    for (let at = Math.max(end - LENGTH, Math.min(first, end - SHORTEST)); at < end; at += 1) {
      const row = seconds.get(at);
      made[0].push(at);
      for (let index = 1; index < 4; index += 1) made[index].push(row ? row[index] : at < first ? null : 0);
      for (let index = 4; index < 6; index += 1) made[index].push(row ? row[index] : null);
    }
    return made;
  };
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
  const length = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 1 : 0)} s`);
  const options = (holder, series, format, least) => ({
    width: holder.clientWidth, height: holder.clientHeight, pxAlign: 0, legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(least, (high || 0) * 1.15)] } },
    axes: [
      { stroke: colour("--dim"), grid: { show: false }, ticks: { show: false }, size: 24, space: 70, font: "11px system-ui", values: (_, all) => all.map((at) => clock(at).slice(0, 8)) },
      { stroke: colour("--dim"), grid: { stroke: colour("--faint"), width: 1 }, ticks: { show: false }, size: 52, space: 30, font: "11px system-ui", values: (_, all) => all.map(format) },
    ],
    series: [{}, ...series],
  });
  const line = (name, width, fill) => ({ stroke: colour(name), width, points: { show: false }, spanGaps: false, fill: fill ? `${colour(name)}22` : undefined });
  let charts = [];
  const draw = () => {
    charts.forEach((one) => one.destroy());
    const found = rows(), dots = (name) => ({ ...line(name, 1.5), points: { show: true, size: 4 } });
    charts = [
      new uPlot(options(rate, [line("--RUNNING", 1.5, true), line("--SUCCESS", 1.5), line("--FAIL", 1.5)], (value) => String(value), 5), found.slice(0, 4), rate),
      new uPlot(options(late, [dots("--RUNNING"), dots("--TIMEOUT")], length, 0.05), [found[0], found[4], found[5]], late),
    ];
  };
  const put = (id, words) => { const one = document.getElementById(id); if (one) one.textContent = words; };
  const renew = () => {
    if (isPaused || document.hidden || !charts.length) return;
    const found = rows();
    charts[0].setData(found.slice(0, 4));
    charts[1].setData([found[0], found[4], found[5]]);
    // The last second may not be whole yet, so the one before it is told.
    const row = seconds.get(now() - 1) || [0, 0, 0, 0, null, null];
    put("now-starts", row[1]); put("now-ends", row[2]); put("now-failures", row[3]);
    const last = [...seconds.values()].filter((one) => one[4] !== null).pop();
    put("now-mid", last ? length(last[4]) : "–"); put("now-max", last ? length(last[5]) : "–");
  };
  const keep = (all) => {
    all.forEach((row) => seconds.set(row[0], row));
    for (const at of seconds.keys()) if (at < now() - 2 * LENGTH) seconds.delete(at);
  };
  document.addEventListener("mtask:history", (event) => { skew = Date.now() - event.detail.now; keep(event.detail.rows); draw(); renew(); });
  document.addEventListener("mtask:rows", (event) => keep(event.detail || []));
  document.addEventListener("mtask:paused", (event) => { isPaused = event.detail; });
  setInterval(renew, 1000);
  addEventListener("resize", () => charts.forEach((one, index) => one.setSize({ width: [rate, late][index].clientWidth, height: rate.clientHeight })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
