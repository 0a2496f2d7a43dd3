// The list of sequences, and the block table of one.

const SHOWN_SEQUENCES = 200;
const HEAD = 5; // entries of a table that are always shown
const byNumber = new Intl.Collator("en", { numeric: true }).compare;

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
    const following = [...this.element.children].find((other) => byNumber(name, other.dataset.name) < 0);
    this.element.insertBefore(option, following ?? null);
    this.options.set(name, option);
    return option;
  }

  #move(event) {
    const names = Array.from(this.element.children, (option) => option.dataset.name);
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

  // Entries of the table that are shown, the first and those about the last token; a number stands
  // for so many that are left out.
  #rows(memory, sequence) {
    const { blocks, first } = sequence;
    const end = Math.ceil(sequence.tokens / memory.about.block_size) - first; // filled entries
    const about = Math.max(HEAD, Math.min(end - 3, blocks.length - 5));
    const near = (index) => index < HEAD || (index >= about && index < about + 5);
    const rows = [];
    blocks.forEach((block, index) => {
      const place = first + index;
      if (near(index)) rows.push({ place, block, tokens: memory.tokensAt(sequence, place) });
      else if (typeof rows.at(-1) === "number") rows[rows.length - 1]++;
      else rows.push(1);
    });
    return rows;
  }

  #svg(memory, sequence, rows, colour) {
    const shown = rows.filter((row) => typeof row !== "number");
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
      if (typeof row === "number") svg.append(label(4, y + 14, `⋮ ${count.format(row)} more`, "head"));
      else svg.append(...this.#entry(memory, row, y, yOf.get(row.block), colour));
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
    label(x + 6, y + 13, text, filled > 8 + 7 * text.length ? "on" : "over"),
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
