"use strict";

// The page of one engine. Events come from a fetch, not an EventSource: that could not send a key.
// Memory holds who owns which block; a Recorder keeps the last minute of changes to replay; views
// draw a Memory, the live one or one in the replay.

const MINUTE_S = 60;
const COLOURS = 10;
const $ = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en");
const percent = (share) => (100 * share).toFixed(1) + " %";
const still = matchMedia("(prefers-reduced-motion: reduce)");

// -- the state of the pool ----------------------------------------------------------------------

class Memory {
  constructor() {
    this.time = 0;
    this.figures = {};
    this.about = { num_blocks: 0, block_size: 1 };
    this.preempted = [];
    this.#reset(0);
  }

  #reset(numBlocks) {
    this.holders = new Uint16Array(numBlocks); // sequences that hold the block
    this.owner = new Int32Array(numBlocks).fill(-1); // the one whose colour it has
    this.place = new Int32Array(numBlocks); // where in the owner's table
    this.cached = new Uint8Array(numBlocks);
    this.sequences = new Map(); // by name
    this.byKey = new Map();
    this.lastKey = 0;
  }

  clone() {
    const copy = Object.assign(new Memory(), this);
    for (const name of ["holders", "owner", "place", "cached"]) copy[name] = this[name].slice();
    copy.sequences = new Map();
    copy.byKey = new Map();
    for (const [name, sequence] of this.sequences) {
      const own = { ...sequence, blocks: sequence.blocks.slice() };
      copy.sequences.set(name, own);
      copy.byKey.set(own.key, own);
    }
    return copy;
  }

  // Returns the blocks that look different now; null: all of them.
  apply({ kind, data }) {
    this.time = data.time;
    if (kind === "snapshot") {
      this.about = data;
      this.#reset(data.num_blocks);
    }
    const touched = [];
    const orphans = new Set();
    for (const name of data.ended || []) this.#remove(name, touched, orphans);
    for (const each of data.sequences || []) this.#remove(each.name, touched, orphans);
    for (const each of data.sequences || []) this.#add(each, touched);
    for (const [name, runs] of data.grown || []) {
      this.#hold(this.sequences.get(name), expanded(runs), touched);
    }
    for (const [name, tokens] of data.tokens || []) this.#fill(name, tokens, touched);
    this.#mark(data.uncached, 0, touched);
    this.#mark(data.cached, 1, touched);
    if (orphans.size) this.#adopt(orphans);
    if (data.preempted) this.preempted = data.preempted;
    this.figures = { ...this.figures, ...data.figures };
    return kind === "snapshot" ? null : touched;
  }

  #add({ name, first_block, blocks, num_tokens }, touched) {
    const key = this.lastKey++;
    const sequence = { name, key, first: first_block, blocks: [], tokens: num_tokens };
    sequence.colour = this.#freeColour();
    this.sequences.set(name, sequence);
    this.byKey.set(key, sequence);
    this.#hold(sequence, expanded(blocks), touched);
  }

  #freeColour() {
    const uses = new Array(COLOURS).fill(0);
    for (const sequence of this.sequences.values()) uses[sequence.colour]++;
    const fewest = Math.min(...uses);
    for (let step = 0; ; step++) {
      const colour = (this.lastKey + step) % COLOURS;
      if (uses[colour] === fewest) return colour;
    }
  }

  #hold(sequence, blocks, touched) {
    for (const block of blocks) {
      if (this.holders[block]++ === 0) {
        this.owner[block] = sequence.key;
        this.place[block] = sequence.first + sequence.blocks.length;
      }
      sequence.blocks.push(block);
      touched.push(block);
    }
  }

  #remove(name, touched, orphans) {
    const sequence = this.sequences.get(name);
    if (!sequence) return;
    for (const block of sequence.blocks) {
      this.holders[block]--;
      if (this.owner[block] === sequence.key) {
        this.owner[block] = -1;
        if (this.holders[block]) orphans.add(block);
      }
      touched.push(block);
    }
    this.sequences.delete(name);
    this.byKey.delete(sequence.key);
  }

  // Blocks that a sequence left and that others still hold take the colour of one of those.
  #adopt(orphans) {
    for (const sequence of this.sequences.values()) {
      sequence.blocks.forEach((block, index) => {
        if (this.owner[block] === -1 && orphans.has(block)) {
          this.owner[block] = sequence.key;
          this.place[block] = sequence.first + index;
        }
      });
    }
  }

  #fill(name, tokens, touched) {
    const sequence = this.sequences.get(name);
    const size = this.about.block_size;
    const [low, high] = [Math.min(tokens, sequence.tokens), Math.max(tokens, sequence.tokens)];
    const from = Math.floor(low / size) - sequence.first;
    const to = Math.ceil(high / size) - sequence.first;
    for (let index = Math.max(0, from); index < Math.min(to, sequence.blocks.length); index++) {
      touched.push(sequence.blocks[index]);
    }
    sequence.tokens = tokens;
  }

  #mark(runs, flag, touched) {
    for (const block of expanded(runs || [])) {
      this.cached[block] = flag;
      touched.push(block);
    }
  }

  ownerOf(block) {
    return this.byKey.get(this.owner[block]);
  }

  // Tokens in entry `place` of a sequence's table.
  tokensAt(sequence, place) {
    const size = this.about.block_size;
    return Math.max(0, Math.min(size, sequence.tokens - place * size));
  }

  unusedSlots(sequence) {
    const end = (sequence.first + sequence.blocks.length) * this.about.block_size;
    return Math.max(0, end - sequence.tokens);
  }

  get shares() {
    const { num_blocks, block_size } = this.about;
    const { live_tokens = 0, used_blocks = 0, cached_blocks = 0 } = this.figures;
    const slots = num_blocks * block_size || 1;
    const used = used_blocks * block_size;
    return {
      utilisation: live_tokens / slots,
      waste: used ? 1 - live_tokens / used : 0,
      used: used / slots,
      cached: (cached_blocks * block_size) / slots,
    };
  }
}

function expanded(runs) {
  const blocks = [];
  for (const [first, many] of runs) for (let i = 0; i < many; i++) blocks.push(first + i);
  return blocks;
}

// -- the last minute ----------------------------------------------------------------------------

class Recorder {
  constructor() {
    this.base = null; // the memory before the first event
    this.events = [];
    this.samples = []; // figures over time, for the charts
  }

  add(event, memory) {
    if (!this.base || memory.time < this.samples.at(-1).time) { // or another engine's clock
      this.base = memory.clone();
      this.events = [];
      this.samples = [];
    } else {
      this.events.push(event);
    }
    this.samples.push({ time: memory.time, figures: memory.figures, ...memory.shares });
    const begin = memory.time - MINUTE_S;
    while (this.events.length && this.events[0].data.time < begin) this.base.apply(this.events.shift());
    while (this.samples.length > 1 && this.samples[1].time < begin - 2) this.samples.shift();
  }
}

// The memory at any moment of a recorded minute.
class Replay {
  constructor(recorder, now) {
    this.base = recorder.base.clone();
    this.events = recorder.events.slice();
    this.samples = recorder.samples.slice();
    this.end = now;
    this.begin = Math.max(this.base.time, now - MINUTE_S);
    this.seek(this.begin);
  }

  // Returns the blocks that look different; null: all.
  seek(time) {
    let touched = [];
    if (!this.memory || time < this.time) {
      this.memory = this.base.clone();
      this.next = 0;
      touched = null;
    }
    this.time = time;
    while (this.next < this.events.length && this.events[this.next].data.time <= time) {
      const more = this.memory.apply(this.events[this.next++]);
      if (more === null) touched = null;
      else if (touched) for (const block of more) touched.push(block);
    }
    return touched;
  }
}

// -- the map of blocks --------------------------------------------------------------------------

class MapView {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.cursor = -1;
    this.selected = null;
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    this.free = colour("free");
    this.cachedColour = colour("cached");
    this.ink = colour("ink");
    this.page = colour("page");
    this.owners = Array.from({ length: COLOURS }, (_, i) => colour("o" + i));
    this.hatches = this.owners.map((owner) => this.#hatch(owner));
  }

  #hatch(colour) {
    const tile = document.createElement("canvas");
    const side = 6 * Math.max(1, Math.round(devicePixelRatio));
    tile.width = tile.height = side;
    const context = tile.getContext("2d");
    context.fillStyle = this.free;
    context.fillRect(0, 0, side, side);
    context.strokeStyle = colour;
    context.lineWidth = side / 4.5;
    context.beginPath();
    for (const shift of [-side, 0, side]) {
      context.moveTo(shift - 1, side + 1);
      context.lineTo(shift + side + 1, -1);
    }
    context.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  // Chooses the largest cells with which the pool fits, and draws all.
  layout(memory) {
    const scale = devicePixelRatio;
    const width = Math.floor(this.canvas.clientWidth * scale);
    const numBlocks = memory.about.num_blocks;
    if (!width || !numBlocks) return;
    const tallest = Math.min(460, innerHeight * 0.6) * scale;
    let cell = Math.floor(Math.min(30 * scale, Math.sqrt((width * tallest) / numBlocks)));
    cell = Math.max(1, cell);
    this.cell = cell;
    this.gap = cell >= 10 * scale ? Math.round(2 * scale) : cell >= 5 ? 1 : 0;
    this.perRow = Math.max(1, Math.floor(width / cell));
    this.canvas.width = width;
    this.canvas.height = Math.ceil(numBlocks / this.perRow) * cell;
    this.canvas.style.height = this.canvas.height / scale + "px";
    this.draw(memory, null);
  }

  draw(memory, touched) {
    if (!this.cell) return;
    if (touched === null) {
      this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      this.#drawAll(memory);
    } else {
      for (const block of touched) this.#drawBlock(memory, block);
    }
    this.#outlineCursor();
  }

  // Free and cached runs as wide rectangles first: most of a large pool is drawn in few calls.
  #drawAll(memory) {
    const { num_blocks } = memory.about;
    for (let row = 0; row < num_blocks; row += this.perRow) {
      const end = Math.min(row + this.perRow, num_blocks);
      for (let block = row; block < end; ) {
        const kind = this.#plain(memory, block);
        if (kind === null || this.gap) {
          this.#drawBlock(memory, block++);
          continue;
        }
        const first = block;
        while (block < end && this.#plain(memory, block) === kind) block++;
        const [x, y] = this.#corner(first);
        this.context.fillStyle = kind;
        this.context.fillRect(x, y, (block - first) * this.cell, this.cell);
      }
    }
  }

  // The colour of a block that has one only.
  #plain(memory, block) {
    const owner = memory.ownerOf(block);
    if (!owner) return memory.cached[block] ? this.cachedColour : this.free;
    if (owner.name === this.selected) return null;
    const full = memory.tokensAt(owner, memory.place[block]) === memory.about.block_size;
    return full ? this.owners[owner.colour] : null;
  }

  #corner(block) {
    return [(block % this.perRow) * this.cell, Math.floor(block / this.perRow) * this.cell];
  }

  #drawBlock(memory, block) {
    const { context, cell, gap } = this;
    const [x, y] = this.#corner(block);
    const side = cell - gap;
    context.clearRect(x, y, cell, cell);
    const owner = memory.ownerOf(block);
    if (!owner) {
      context.fillStyle = memory.cached[block] ? this.cachedColour : this.free;
      context.fillRect(x, y, side, side);
      return;
    }
    const share = memory.tokensAt(owner, memory.place[block]) / memory.about.block_size;
    this.#drawHeld(x, y, side, owner.colour, share);
    if (memory.holders[block] > 1 && side >= 6) this.#dot(x, y, side);
    if (owner.name === this.selected) this.#frame(x, y, side, this.ink);
  }

  #drawHeld(x, y, side, colour, share) {
    const { context } = this;
    const filled = Math.round(side * share);
    if (filled < side) {
      if (side < 5) {
        context.globalAlpha = 0.35;
        context.fillStyle = this.owners[colour];
      } else {
        context.fillStyle = this.hatches[colour];
      }
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1;
    }
    context.fillStyle = this.owners[colour];
    context.fillRect(x, y, filled, side);
  }

  // Shared by several sequences.
  #dot(x, y, side) {
    const { context } = this;
    context.fillStyle = this.page;
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, side / 6, 0, 7);
    context.fill();
  }

  #frame(x, y, side, colour) {
    const width = Math.max(1, Math.min(2 * devicePixelRatio, side / 4));
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
  }

  #outlineCursor() {
    if (this.cursor < 0 || document.activeElement !== this.canvas) return;
    const [x, y] = this.#corner(this.cursor);
    this.#frame(x, y, Math.max(this.cell - this.gap, 3), this.ink);
  }

  moveCursor(memory, block) {
    const old = this.cursor;
    this.cursor = Math.max(0, Math.min(memory.about.num_blocks - 1, block));
    this.draw(memory, old < 0 ? [] : [old]);
  }

  select(memory, name) {
    const touched = [this.selected, name].flatMap((n) => memory.sequences.get(n)?.blocks || []);
    this.selected = name;
    this.draw(memory, touched);
  }

  blockAt(event, memory) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * devicePixelRatio) / this.cell);
    const row = Math.floor(((event.clientY - box.top) * devicePixelRatio) / this.cell);
    const block = row * this.perRow + column;
    return column < this.perRow && block < memory.about.num_blocks ? block : -1;
  }
}

function described(memory, block) {
  if (block < 0 || block >= memory.about.num_blocks) return "";
  const owner = memory.ownerOf(block);
  const name = `Block ${count.format(block)}`;
  if (!owner) return memory.cached[block] ? `${name}: cached, held by nobody` : `${name}: free`;
  const place = memory.place[block];
  const tokens = memory.tokensAt(owner, place);
  const others = memory.holders[block] - 1;
  const shared = others ? `, shared with ${others} more` : "";
  return (
    `${name}: logical block ${place} of sequence ${owner.name}, ` +
    `${tokens} of ${memory.about.block_size} tokens${shared}`
  );
}

// -- sequences and the block table --------------------------------------------------------------

const SHOWN_SEQUENCES = 200;
const SHOWN_ENTRIES = 10;

class SequenceList {
  constructor(element, choose) {
    this.element = element;
    this.choose = choose;
    this.options = new Map();
    element.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) choose(option.dataset.name);
    });
    element.addEventListener("keydown", (event) => this.#move(event));
  }

  draw(memory, selected, colours) {
    for (const [name, option] of this.options) {
      if (!memory.sequences.has(name)) {
        option.remove();
        this.options.delete(name);
      }
    }
    for (const sequence of memory.sequences.values()) {
      if (this.options.size >= SHOWN_SEQUENCES && !this.options.has(sequence.name)) continue;
      this.#drawOne(memory, sequence, selected, colours);
    }
    if (selected) this.element.setAttribute("aria-activedescendant", `sequence-${selected}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #drawOne(memory, sequence, selected, colours) {
    let option = this.options.get(sequence.name);
    if (!option) option = this.#create(sequence.name);
    const [swatch, , tokens, blocks] = option.children;
    swatch.style.background = colours[sequence.colour];
    setText(tokens, `${count.format(sequence.tokens)} tokens`);
    setText(blocks, `${count.format(sequence.blocks.length)} blocks`);
    option.setAttribute("aria-selected", String(sequence.name === selected));
  }

  #create(name) {
    const option = document.createElement("div");
    option.role = "option";
    option.id = `sequence-${name}`;
    option.dataset.name = name;
    option.append(...["i", "span", "span", "span"].map((tag) => document.createElement(tag)));
    option.children[1].textContent = `sequence ${name}`;
    this.element.append(option);
    this.options.set(name, option);
    return option;
  }

  #move(event) {
    const names = [...this.options.keys()];
    const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !names.length) return;
    event.preventDefault();
    const at = names.findIndex((n) => this.options.get(n).getAttribute("aria-selected") === "true");
    const to = Math.max(0, Math.min(names.length - 1, at + steps[event.key]));
    this.choose(names[to]);
    this.options.get(names[to]).scrollIntoView({ block: "nearest" });
  }
}

// Logical blocks, the block table, physical blocks: as the paper on PagedAttention draws them.
class TableFigure {
  constructor(element) {
    this.element = element;
    this.drawn = "";
  }

  draw(memory, sequence, colours) {
    const signature = sequence
      ? [sequence.name, sequence.colour, sequence.tokens, sequence.blocks.length, ...colours].join()
      : "";
    if (signature === this.drawn) return;
    this.drawn = signature;
    this.element.replaceChildren();
    if (!sequence) return;
    const rows = this.#rows(memory, sequence);
    this.element.append(this.#svg(memory, sequence, rows, colours[sequence.colour]));
  }

  // Entries of the table that are shown; null stands for those left out.
  #rows(memory, sequence) {
    const { blocks, first } = sequence;
    const entry = (index) => ({
      place: first + index,
      block: blocks[index],
      tokens: memory.tokensAt(sequence, first + index),
    });
    const all = blocks.map((_, index) => index);
    if (all.length <= SHOWN_ENTRIES) return all.map(entry);
    const head = all.slice(0, SHOWN_ENTRIES / 2).map(entry);
    return [...head, null, ...all.slice(-SHOWN_ENTRIES / 2 + 1).map(entry)];
  }

  #svg(memory, sequence, rows, colour) {
    const shown = rows.filter(Boolean);
    const physical = shown.map((row) => row.block).sort((a, b) => a - b);
    const slots = []; // the physical column: blocks and gaps
    for (const block of physical) {
      const last = slots.at(-1);
      if (last !== undefined && block !== last + 1) slots.push(null);
      slots.push(block);
    }
    const height = 22;
    const total = Math.max(rows.length, slots.length) * height + 22;
    const svg = shape("svg", { viewBox: `0 0 360 ${total}`, role: "img" });
    svg.append(titled(`Block table of sequence ${sequence.name}: ` + inWords(shown)), hatching(colour));
    for (const [x, text] of [[0, "logical"], [132, "block · tokens"], [268, "physical"]]) {
      svg.append(label(x, 12, text, "head"));
    }
    const yOf = new Map(slots.map((block, index) => [block, 22 + index * height]));
    rows.forEach((row, index) => {
      const y = 22 + index * height;
      if (!row) {
        const left = sequence.blocks.length - shown.length;
        svg.append(label(4, y + 14, `⋮ ${count.format(left)} more`, "head"));
        return;
      }
      svg.append(...this.#entry(memory, row, y, yOf.get(row.block), colour));
    });
    for (const [index, block] of slots.entries()) {
      if (block === null) svg.append(label(306, 22 + index * height + 14, "⋮", "head"));
    }
    return svg;
  }

  #entry(memory, row, y, target, colour) {
    const size = memory.about.block_size;
    const link = `M208 ${y + 9} C240 ${y + 9} 236 ${target + 9} 266 ${target + 9}`;
    return [
      ...filledBox(0, y, 84, row.tokens / size, colour, String(row.place)),
      shape("path", { class: "link", d: `M84 ${y + 9} H130` }),
      shape("rect", { class: "cell", x: 130.5, y: y + 0.5, width: 77, height: 18 }),
      shape("path", { class: "cell", d: `M176.5 ${y + 0.5} V${y + 18.5}` }),
      label(153, y + 13, String(row.block), "", "middle"),
      label(192, y + 13, String(row.tokens), "", "middle"),
      shape("path", { class: "link", d: link }),
      ...filledBox(268, y + (target - y), 84, row.tokens / size, colour, String(row.block)),
    ];
  }
}

function filledBox(x, y, width, share, colour, text) {
  const filled = Math.round(width * share);
  return [
    shape("rect", { class: "box", x, y, width, height: 19 }),
    shape("rect", { x, y, width, height: 19, fill: "url(#waste)" }),
    shape("rect", { x, y, width: filled, height: 19, fill: colour }),
    label(x + 6, y + 13, text, share > 0.3 ? "on" : ""),
  ];
}

function hatching(colour) {
  const pattern = shape("pattern", {
    id: "waste", width: 6, height: 6, patternUnits: "userSpaceOnUse",
  });
  pattern.append(shape("path", { d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", stroke: colour, "stroke-width": 1.2 }));
  const definitions = shape("defs", {});
  definitions.append(pattern);
  return definitions;
}

function inWords(rows) {
  return rows
    .map((row) => `logical ${row.place} in physical ${row.block} with ${row.tokens} tokens`)
    .join("; ");
}

function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function label(x, y, text, name = "", anchor = "start") {
  const element = shape("text", { x, y, class: name, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

function titled(text) {
  const title = shape("title", {});
  title.textContent = text;
  return title;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- charts -------------------------------------------------------------------------------------

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
    const values = samples.map((sample, i) => ({ time: sample.time, value: at(sample, i) }));
    values.push({ time: end, value: speedAt(samples, end) });
    const top = rounded(Math.max(1, ...values.map((each) => each.value)));
    const path = stepped(values, end, top, (each) => each.value);
    this.#show($("chart-speed"), cursor, end, count.format(top), [
      shape("path", { d: path, class: "line", stroke: "var(--o0)" }),
    ], `${Math.round(values.at(-1).value)} output tokens a second, at most ${top}`);
  }

  #queue(samples, end, cursor) {
    const most = (name) => Math.max(...samples.map((s) => s.figures[name] || 0));
    const top = rounded(Math.max(4, most("num_running"), most("num_waiting")));
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

// The next number that begins with 1, 2 or 5.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

// -- the stream ---------------------------------------------------------------------------------

class Unauthorized extends Error {}

// Calls back with each event, until the stream ends. Reads the page's own path, in any mount.
async function listen(key, signal, heard) {
  const url = location.pathname.replace(/\/+$/, "") + "/events";
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
      if (match) heard({ kind: match[1], data: JSON.parse(match[2]) });
    }
  }
}

// -- the page -----------------------------------------------------------------------------------

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
    for (;;) {
      this.abort = new AbortController();
      let said = "connection lost, trying again";
      try {
        await listen(this.key, this.abort.signal, (event) => this.#hear(event));
      } catch (error) {
        if (error instanceof Unauthorized) return this.#askForKey("That key is not one of this server's.");
        if (error.message === "the engine is closed") said = error.message;
      }
      if (this.away) return undefined;
      this.#say(this.ended ? "the engine is closed" : said, "lost");
      this.ended = false;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  #hear(event) {
    if (event.kind === "end") {
      this.ended = true;
      return;
    }
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
    if ($("tables").open) this.#drawRows(memory);
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

  #drawRows(memory) {
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
    new ResizeObserver(() => this.map.layout(this.shown)).observe(canvas.parentElement);
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
    const owner = block >= 0 && this.shown.ownerOf(block);
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
    else if (this.touched) this.touched.push(...touched);
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
