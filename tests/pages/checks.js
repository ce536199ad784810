// What is wrong with the content of a page: parts that cannot be seen, and text with too little contrast (WCAG 2.2).
(paper => {
  const root = document.querySelector(".md-content") || document.querySelector("main") || document.body;
  const problems = new Set();
  const named = element => `<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ` +
    `“${(element.textContent || element.alt || "").trim().slice(0, 60)}”`;
  const scrolls = style => ["auto", "scroll"].includes(style.overflowX);

  // --- clipped ---
  const wide = document.scrollingElement;
  if (wide.scrollWidth > innerWidth + 1) problems.add(`the page is ${wide.scrollWidth} px wide, the window ${innerWidth}`);
  const shown = element => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  for (const element of root.querySelectorAll("*")) {
    if (!shown(element)) continue;
    const style = getComputedStyle(element);
    const hides = ["hidden", "clip"].includes(style.overflowX) || (paper && scrolls(style));
    if (hides && element.clientWidth > 1 && element.scrollWidth > element.clientWidth + 1)
      problems.add(`clipped: ${named(element)} needs ${element.scrollWidth} px and has ${element.clientWidth}`);
    const box = element.getBoundingClientRect();
    const hanging = style.display === "inline" ? 8 : 1; // a space at the end of a line hangs over it
    if (box.width < 2 || box.right <= innerWidth + hanging) continue;
    let around = element.parentElement;
    while (around && !scrolls(getComputedStyle(around))) around = around.parentElement;
    if (!around || paper) problems.add(`beyond the edge: ${named(element)} ends at ${Math.round(box.right)} px`);
  }

  // --- contrast ---
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [red, green, blue, alpha / 255]);
    }
    return known.get(color);
  };
  const over = (top, under, alpha) => under.map((part, k) => top[k] * alpha + part * (1 - alpha));
  const luminance = color => {
    const [red, green, blue] = color.map(part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches && getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const ground = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.backgroundImage !== "none") return null; // a picture or a gradient: not one colour
      const color = rgba(style.backgroundColor);
      if (color[3] > 0) layers.push(color);
      if (color[3] === 1) break;
    }
    let found = isDark ? [18, 18, 18] : [255, 255, 255];
    for (const layer of layers.reverse()) found = over(layer, found, layer[3]);
    return found;
  };
  let texts = 0;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !shown(element) || element.closest("script, style, svg, iframe, [disabled]")) continue;
    const under = ground(element);
    if (!under) continue;
    let alpha = 1;
    for (let at = element; at; at = at.parentElement) alpha *= Number(getComputedStyle(at).opacity);
    const color = rgba(getComputedStyle(element).color);
    const seen = over(color, under, color[3] * alpha);
    const [low, high] = [luminance(seen), luminance(under)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    texts += 1;
    if (ratio < 4.5) problems.add(`contrast ${ratio.toFixed(2)}: ${named(element)} in ${getComputedStyle(element).color}`);
  }
  return { texts, problems: [...problems] };
})
