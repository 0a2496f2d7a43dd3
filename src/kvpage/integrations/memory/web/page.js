// The page of one engine: what comes, what is drawn, what the reader does.

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

class Unauthorized extends Error {}

// Calls back with each event, until the stream ends. Reads the page's own path, in any mount.
async function listen(key, signal, heard) {
  const url = location.pathname.replace(/\/+$/, "") + "/events";
  if (!/^[\x21-\x7e]*$/.test(key)) throw new Unauthorized(); // no header can hold it
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(url, { headers, signal, cache: "no-store" });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(answer.status === 503 ? "the engine is closed" : "no answer");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const match = /^event: (\w+)\ndata: (.*)$/.exec(part);
      if (match) hearOne(heard, { kind: match[1], data: JSON.parse(match[2]) });
    }
  }
}

// A fault of the page itself is not taken for one of the connection; a new snapshot mends it.
function hearOne(heard, event) {
  try {
    heard(event);
  } catch (error) {
    reportError(error);
    throw error;
  }
}

class Page {
  constructor() {
    this.memory = new Memory();
    this.recorder = new Recorder();
    this.replay = null;
    this.selected = null; // by the reader; otherwise the first sequence is shown
    this.key = "";
    this.map = new MapView($("map"));
    this.charts = new Charts();
    this.figure = new TableFigure($("figure"));
    this.list = new SequenceList($("sequences"), (name) => this.select(name));
    this.touched = [];
    this.scheduled = false;
    this.arrived = performance.now();
    this.rowsAt = -Infinity;
  }

  start() {
    this.#listenToReader();
    setInterval(() => this.#tick(), still.matches ? 1000 : 250);
    if (document.body.dataset.key === "needed") this.#askForKey("");
    else this.#connect();
  }

  get shown() {
    return this.replay ? this.replay.memory : this.memory;
  }

  // The engine's clock, now.
  get now() {
    return this.memory.time + (performance.now() - this.arrived) / 1000;
  }

  // -- what comes

  async #connect() {
    if (this.connecting) return;
    this.connecting = true;
    const complaint = await this.#stayConnected();
    this.connecting = false;
    if (complaint) this.#askForKey(complaint);
  }

  // Until the page is hidden, or a key is refused: then returns what to say of it.
  async #stayConnected() {
    for (;;) {
      this.abort = new AbortController();
      let said = "connection lost, trying again";
      try {
        await listen(this.key, this.abort.signal, (event) => this.#hear(event));
      } catch (error) {
        if (error instanceof Unauthorized) return "That key is not one of this server's.";
        if (error.message === "the engine is closed") said = error.message;
      }
      if (this.away) return null;
      if (this.last === "again") {
        this.last = null;
        continue;
      }
      this.#say(this.last === "end" ? "the engine is closed" : said, "lost");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  #hear(event) {
    this.last = event.kind;
    if (event.kind === "end" || event.kind === "again") return;
    const before = this.memory.preempted;
    const touched = this.memory.apply(event);
    this.arrived = performance.now();
    this.recorder.add(event, this.memory);
    if (event.kind === "snapshot") this.#begin();
    else this.#notePreemptions(this.memory.preempted.filter((name) => !before.includes(name)));
    if (this.replay) return;
    if (touched === null) this.touched = null;
    else if (this.touched) for (const block of touched) this.touched.push(block);
    this.#schedule();
  }

  #begin() {
    const { model, allocator, num_blocks, block_size } = this.memory.about;
    $("key").hidden = true;
    $("main").hidden = false;
    setText($("model"), model);
    setText($("about"), `${allocator}: ${count.format(num_blocks)} blocks of ${block_size} tokens`);
    document.title = `Memory of ${model} – kvpage`;
    if (!this.replay) {
      this.#say("live", "live");
      this.map.layout(this.memory);
    }
  }

  #say(text, state) {
    if (this.replay && state === "live") return;
    setText($("state"), text);
    $("state").className = `state ${state}`;
  }

  #notePreemptions(names) {
    if (!names.length) return;
    $("no-events").hidden = true;
    const line = document.createElement("li");
    const time = document.createElement("time");
    time.textContent = new Date().toLocaleTimeString();
    const [noun, whose] = names.length > 1 ? ["sequences", "their"] : ["sequence", "its"];
    line.append(time, `${noun} ${names.join(", ")} lost ${whose} blocks`);
    $("events").prepend(line);
    while ($("events").children.length > 8) $("events").lastChild.remove();
  }

  // -- drawing

  #schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    const draw = () => {
      this.scheduled = false;
      this.#draw();
    };
    if (still.matches) setTimeout(draw, 1000);
    else requestAnimationFrame(draw);
  }

  #draw() {
    const memory = this.shown;
    const chosen = memory.sequences.get(this.selected) || memory.sequences.values().next().value;
    const name = chosen ? chosen.name : null;
    const touched = this.touched;
    this.touched = [];
    if (name !== this.map.selected) this.map.select(memory, name);
    this.map.draw(memory, touched);
    this.list.draw(memory, name, this.map.owners);
    this.figure.draw(memory, chosen, this.map.owners);
    this.#drawFigures(memory);
    this.#drawCharts();
    if ($("tables").open && performance.now() > this.rowsAt + 2000) this.#drawRows(memory);
    if (this.pointed >= 0) setText($("readout"), described(memory, this.pointed));
  }

  #drawFigures(memory) {
    const { figures, shares } = memory;
    const samples = (this.replay || this.recorder).samples;
    const speed = speedAt(samples, this.replay ? this.replay.time : this.now);
    setText($("utilisation"), percent(shares.utilisation));
    setText($("internal-waste"), percent(shares.waste));
    setText($("external-waste"), percent(figures.external_waste));
    setText($("running"), count.format(figures.num_running));
    setText($("waiting"), count.format(figures.num_waiting));
    setText($("speed"), count.format(Math.round(speed)));
    setText($("preemptions"), count.format(figures.preemptions));
    setText($("used"), count.format(figures.used_blocks));
    setText($("cached"), count.format(figures.cached_blocks));
    setText($("free"), count.format(figures.free_blocks));
    $("none").hidden = memory.sequences.size > 0;
    $("table-title").hidden = memory.sequences.size === 0;
    $("sequences").hidden = memory.sequences.size === 0;
  }

  #drawCharts() {
    if (this.replay) this.charts.draw(this.replay.samples, this.replay.end, this.replay.time);
    else this.charts.draw(this.recorder.samples, this.now, null);
  }

  // Seldom: nobody can read what changes five times a second.
  #drawRows(memory) {
    this.rowsAt = performance.now();
    const rows = [...memory.sequences.values()].slice(0, SHOWN_SEQUENCES).map((sequence) => {
      const row = document.createElement("tr");
      const shown = sequence.blocks.slice(0, 24).join(" ");
      const more = sequence.blocks.length - 24;
      const cells = [
        sequence.name,
        count.format(sequence.tokens),
        count.format(sequence.blocks.length),
        count.format(memory.unusedSlots(sequence)),
        more > 0 ? `${shown} and ${count.format(more)} more` : shown,
      ];
      row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
      return row;
    });
    $("rows").replaceChildren(...rows);
  }

  // The charts move on while nothing comes; a replay plays.
  #tick() {
    if ($("main").hidden) return;
    if (this.replay) {
      if (this.playing) this.#seek(Math.min(this.replay.end, this.replay.time + this.#sinceTick()));
      return;
    }
    this.#drawFigures(this.memory);
    this.#drawCharts();
  }

  #sinceTick() {
    const now = performance.now();
    const seconds = (now - this.ticked) / 1000;
    this.ticked = now;
    return seconds;
  }

  // -- what the reader does

  #listenToReader() {
    const canvas = $("map");
    canvas.addEventListener("pointermove", (event) => this.#point(this.map.blockAt(event, this.shown)));
    canvas.addEventListener("pointerleave", () => { this.pointed = -1; });
    canvas.addEventListener("click", (event) => this.#selectAt(this.map.blockAt(event, this.shown)));
    canvas.addEventListener("keydown", (event) => this.#moveCursor(event));
    for (const name of ["focus", "blur"]) {
      canvas.addEventListener(name, () => this.map.moveCursor(this.shown, this.map.cursor));
    }
    $("replay").addEventListener("click", () => this.#toggleReplay());
    $("play").addEventListener("click", () => this.#play(!this.playing));
    $("moment").addEventListener("input", () => {
      this.#play(false);
      this.#seek(this.replay.end - MINUTE_S + Number($("moment").value));
    });
    $("tables").addEventListener("toggle", () => this.#draw());
    $("key").addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = $("key-input").value.trim();
      this.#connect();
    });
    new ResizeObserver(() => this.map.fit(this.shown)).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.map.readColours();
      this.map.layout(this.shown);
      this.#draw();
    });
    document.addEventListener("visibilitychange", () => this.#comeOrGo());
  }

  select(name) {
    this.selected = name;
    this.#draw();
  }

  #point(block) {
    this.pointed = block;
    setText($("readout"), described(this.shown, block) || "Point at a block, or move with the arrow keys.");
  }

  #selectAt(block) {
    if (block < 0) return;
    this.map.moveCursor(this.shown, block);
    const owner = this.shown.ownerOf(block);
    if (owner) this.select(owner.name);
  }

  #moveCursor(event) {
    const { perRow, cursor } = this.map;
    const last = this.shown.about.num_blocks - 1;
    const targets = {
      ArrowRight: cursor + 1, ArrowLeft: cursor - 1, ArrowDown: cursor + perRow,
      ArrowUp: cursor - perRow, Home: 0, End: last,
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#selectAt(cursor);
    } else if (event.key in targets) {
      event.preventDefault();
      const target = targets[event.key];
      if (target >= 0 && target <= last) this.map.moveCursor(this.shown, target);
      this.#point(this.map.cursor);
      setText($("spoken"), $("readout").textContent); // only what the reader asked for
    }
  }

  // -- the replay

  #toggleReplay() {
    const on = !this.replay;
    if (on && !this.recorder.base) return;
    this.replay = on ? new Replay(this.recorder, this.now) : null;
    $("replay").setAttribute("aria-pressed", String(on));
    $("replay-controls").hidden = !on;
    this.touched = null;
    if (on) {
      $("moment").min = (MINUTE_S - (this.replay.end - this.replay.begin)).toFixed(1);
      this.#say("replay", "");
      this.#play(!still.matches);
      this.#seek(this.replay.begin);
    } else {
      this.#say("live", "live");
      this.map.layout(this.memory);
      this.#draw();
    }
  }

  #play(on) {
    if (on && this.replay.time >= this.replay.end) this.#seek(this.replay.begin);
    this.playing = on;
    this.ticked = performance.now();
    setText($("play"), on ? "Pause" : "Play");
  }

  #seek(time) {
    const touched = this.replay.seek(time);
    if (touched === null) this.touched = null;
    else if (this.touched) for (const block of touched) this.touched.push(block);
    const ago = Math.max(0, this.replay.end - time).toFixed(1);
    $("moment").value = MINUTE_S - Number(ago);
    setText($("moment-text"), `${ago} s before`);
    $("moment").setAttribute("aria-valuetext", `${ago} seconds before`);
    if (time >= this.replay.end) this.#play(false);
    this.#draw();
  }

  // -- keys and absence

  #askForKey(complaint) {
    $("main").hidden = true;
    $("key").hidden = false;
    this.#say("locked", "");
    if (complaint) {
      setText($("key-said"), complaint);
      $("key-said").className = "wrong";
    }
    $("key-input").focus();
  }

  // A page that nobody sees lets the engine alone.
  #comeOrGo() {
    clearTimeout(this.leaving);
    if (document.hidden) {
      this.leaving = setTimeout(() => {
        this.away = true;
        this.abort?.abort();
      }, 30000);
    } else if (this.away) {
      this.away = false;
      this.#connect();
    }
  }
}

new Page().start();
