"use strict";

// Who owns which block, as the events of an engine tell it.

const COLOURS = 10;

class Memory {
  constructor() {
    this.time = 0;
    this.figures = {};
    this.about = { num_blocks: 0, block_size: 1 };
    this.preempted = [];
    this.colours = new Map(); // that sequences had before the last snapshot
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
      this.colours = new Map([...this.sequences.values()].map((each) => [each.name, each.colour]));
      this.#reset(data.num_blocks);
    }
    const touched = [];
    const orphans = new Set();
    for (const name of data.ended || []) this.#remove(name, touched, orphans);
    for (const each of data.sequences || []) this.#release(each.name, touched, orphans);
    for (const each of data.sequences || []) this.#place(each, touched);
    for (const [name, packed] of data.grown || []) {
      this.#hold(this.sequences.get(name), expanded(packed), touched);
    }
    for (const [name, tokens] of data.tokens || []) this.#fill(name, tokens, touched);
    this.#mark(data.uncached, 0, touched);
    this.#mark(data.cached, 1, touched);
    if (orphans.size) this.#adopt(orphans);
    if (data.preempted) this.preempted = data.preempted;
    this.figures = { ...this.figures, ...data.figures };
    return kind === "snapshot" ? null : touched;
  }

  // A sequence that is new, or lies elsewhere now.
  #place({ name, first_block, blocks, num_tokens }, touched) {
    const sequence = this.sequences.get(name) || this.#create(name);
    sequence.first = first_block;
    sequence.tokens = num_tokens;
    this.#hold(sequence, expanded(blocks), touched);
  }

  #create(name) {
    const colour = this.colours.get(name) ?? this.#freeColour();
    const sequence = { name, key: this.lastKey++, colour, blocks: [] };
    this.sequences.set(name, sequence);
    this.byKey.set(sequence.key, sequence);
    return sequence;
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
    this.#release(name, touched, orphans);
    this.byKey.delete(this.sequences.get(name).key);
    this.sequences.delete(name);
  }

  #release(name, touched, orphans) {
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
    sequence.blocks = [];
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

  #mark(packed, flag, touched) {
    for (const block of expanded(packed || "")) {
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

// Blocks from runs of them: pairs (first, how many) of int32, in Base64.
function expanded(packed) {
  const runs = new Int32Array(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer);
  const blocks = [];
  for (let at = 0; at < runs.length; at += 2) {
    for (let i = 0; i < runs[at + 1]; i++) blocks.push(runs[at] + i);
  }
  return blocks;
}
