// Numbers in words, SVG in few words.

const count = new Intl.NumberFormat("en");
const percent = (share) => (100 * share).toFixed(1) + " %";

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
