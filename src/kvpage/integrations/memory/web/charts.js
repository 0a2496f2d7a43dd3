// The last minute in curves.

// Steps of a figure over the minute before `end`, as an SVG path in a box of 100 by 100.
function stepped(samples, end, top, value) {
  let path = "";
  for (const [index, sample] of samples.entries()) {
    const x = Math.max(0, 100 + ((sample.time - end) / MINUTE_S) * 100);
    if (x > 100) break;
    const y = (100 - (100 * value(sample)) / top).toFixed(2);
    path += index ? `H${x.toFixed(2)}V${y}` : `M${x.toFixed(2)} ${y}`;
  }
  return path && path + "H100";
}

function area(samples, end, top, value) {
  const path = stepped(samples, end, top, value);
  return path && `${path}V100H${/^M([\d.]+)/.exec(path)[1]}Z`;
}

// Tokens a second over the two seconds before `time`, which may be after the last sample.
function speedAt(samples, time) {
  let last = samples.length - 1;
  while (last > 0 && samples[last].time > time) last--;
  let from = last;
  while (from > 0 && samples[from].time > time - 2) from--;
  if (last <= 0) return 0;
  const tokens = samples[last].figures.output_tokens - samples[from].figures.output_tokens;
  return Math.max(0, tokens) / Math.max(0.5, time - Math.max(samples[from].time, time - 2.3));
}

class Charts {
  draw(samples, end, cursor) {
    const since = samples.filter((sample) => sample.time <= end);
    if (!since.length) return;
    this.#memory(since, end, cursor);
    this.#speed(since, end, cursor);
    this.#queue(since, end, cursor);
  }

  #memory(samples, end, cursor) {
    const last = samples.at(-1);
    this.#show($("chart-memory"), cursor, end, "100 %", [
      shape("path", { d: area(samples, end, 1, (s) => s.used + s.cached), fill: "var(--cached)" }),
      shape("path", { d: area(samples, end, 1, (s) => s.used), fill: "var(--o1)" }),
      shape("path", { d: area(samples, end, 1, (s) => s.utilisation), fill: "var(--o0)" }),
    ], `Tokens fill ${percent(last.utilisation)} of memory, ${percent(last.cached)} is cached`);
  }

  #speed(samples, end, cursor) {
    const at = (sample, i) => speedAt(samples.slice(Math.max(0, i - 15), i + 1), sample.time);
    const values = samples
      .map((sample, i) => ({ time: sample.time, value: at(sample, i) }))
      .filter((each) => each.time > samples[0].time + 1); // before that it is a guess
    values.push({ time: end, value: speedAt(samples, end) });
    const top = rounded(1.15 * Math.max(1, ...values.map((each) => each.value)));
    const path = stepped(values, end, top, (each) => each.value);
    this.#show($("chart-speed"), cursor, end, count.format(top), [
      shape("path", { d: path, class: "line", stroke: "var(--o0)" }),
    ], `${Math.round(values.at(-1).value)} output tokens a second, at most ${top}`);
  }

  #queue(samples, end, cursor) {
    const most = (name) => Math.max(...samples.map((s) => s.figures[name] || 0));
    const top = rounded(1.15 * Math.max(3, most("num_running"), most("num_waiting")));
    const line = (name, colour) => shape("path", {
      d: stepped(samples, end, top, (s) => s.figures[name] || 0), class: "line", stroke: colour,
    });
    const marks = samples
      .filter((s, i) => i && s.figures.preemptions > samples[i - 1].figures.preemptions)
      .map((s) => 100 + ((s.time - end) / MINUTE_S) * 100)
      .filter((x) => x >= 0)
      .map((x) => shape("path", { d: `M${x} 0V12`, class: "mark" }));
    const last = samples.at(-1).figures;
    this.#show($("chart-queue"), cursor, end, count.format(top), [
      line("num_running", "var(--o0)"), line("num_waiting", "var(--o1)"), ...marks,
    ], `${last.num_running} running, ${last.num_waiting} waiting`);
  }

  #show(svg, cursor, end, scale, shapes, words) {
    const plot = shape("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", width: "100%", height: "100%" });
    plot.append(...shapes);
    if (cursor !== null) {
      const x = 100 + ((cursor - end) / MINUTE_S) * 100;
      plot.append(shape("path", { d: `M${x} 0V100`, class: "now" }));
    }
    svg.setAttribute("aria-label", words);
    svg.replaceChildren(plot, label(4, 13, scale, "scale"));
  }
}

// The next round number.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
