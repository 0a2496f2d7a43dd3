// The map of physical blocks. It draws what has changed, and everything only when it must.

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

  // After the page has become wider or narrower.
  fit(memory) {
    const width = Math.floor(this.canvas.clientWidth * devicePixelRatio);
    if (width !== this.canvas.width) this.layout(memory);
  }

  // Chooses the largest cells with which the pool fits, and draws all.
  layout(memory) {
    const scale = devicePixelRatio;
    const width = Math.floor(this.canvas.clientWidth * scale);
    const numBlocks = memory.about.num_blocks;
    if (!width || !numBlocks) return;
    const tallest = Math.min(460, innerHeight * 0.6) * scale;
    const fitting = Math.sqrt((width * tallest) / numBlocks);
    const cell = Math.max(1, Math.round(Math.min(30 * scale, fitting)));
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
