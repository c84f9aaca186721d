"use strict";
// Draws the report: every token gets one span, once, an image one for all; switching the method changes class names only.
(() => {
  const LEVELS = 8; // shades above none; page.css has the same number
  const PHASES = [
    ["load", "load or prefill chunks"],
    ["assemble", "assemble"],
    ["score", "score"],
    ["repair", "repair and prompt"],
    ["other", "other"],
  ];

  const { methods, chunks, prompt_tokens: promptTokens } = JSON.parse(byId("report").textContent);
  const starts = []; // of each chunk in the flat list of tokens
  const chunkOf = []; // chunk of each token, -1 for the prompt
  const spans = [];
  const indexOf = new Map(); // span → its place in `spans`
  const boxOf = []; // of each token that stands for a part of an image, the image's box
  const views = new Map(); // method → what the spans need, made when first shown
  let view;
  let current = 0; // the token that the keyboard is at

  function byId(id) {
    return document.getElementById(id);
  }

  function make(tag, properties = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  const percent = (share) => `${(100 * share).toFixed(1)}\u202f%`;
  const seconds = (value) => (value >= 0.0995 ? `${value.toFixed(2)}\u202fs` : `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)}\u202fms`);
  const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const name = (index) => chunks[index].title || chunks[index].id;
  const clip = (share) => Math.min(1, Math.max(0, share));

  // ---- timings ----

  function drawTimings() {
    const longest = Math.max(...methods.map((m) => m.timings.ttft_seconds), 1e-9);
    byId("phases").append(...PHASES.map(([phase, label]) => make("li", {}, make("i", { className: `swatch ${phase}` }), label)));
    for (const { name: method, timings, usage } of methods) {
      // Where nothing is reused the rows that are "repaired" are all rows.
      const called = (phase, label) => (phase === "repair" && !usage.reusable_tokens ? "prefill" : label);
      const known = PHASES.slice(0, -1).map(([phase, label]) => [phase, called(phase, label), timings[`${phase}_seconds`]]);
      const sum = known.reduce((total, [, , value]) => total + value, 0);
      const parts = [...known, ["other", "other", Math.max(0, timings.ttft_seconds - sum)]].filter(([, , value]) => value > 0);
      // Phases that are timed apart may add up to a little more than the whole; the bar must not overflow then.
      const scale = Math.max(longest, sum);
      const bar = make("div", { className: "stack", "aria-hidden": "true" });
      for (const [phase, , value] of parts) {
        const part = make("i", { className: phase });
        part.style.width = `${(100 * value) / scale}%`;
        bar.append(part);
      }
      const words = parts.map(([, label, value]) => `${label} ${seconds(value)}`).join(" · ");
      byId("timings").append(
        make("div", { className: "timing" },
          make("b", {}, method), bar, make("span", { className: "num" }, seconds(timings.ttft_seconds)),
          make("p", { className: "note" }, `${words}; then decoding ${seconds(timings.decode_seconds)}`)),
      );
    }
  }

  // ---- what is drawn once ----

  function drawTabs() {
    const tabs = methods.map((method, index) =>
      make("button", { type: "button", id: `tab-${index}`, role: "tab", "aria-controls": "panel", tabIndex: -1, onclick: () => show(index) }, method.name));
    byId("tabs").append(...tabs);
    byId("tabs").addEventListener("keydown", (event) => {
      const at = tabs.indexOf(document.activeElement);
      const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tabs.length - 1 };
      if (at < 0 || !(event.key in steps)) return;
      event.preventDefault();
      const next = (steps[event.key] + tabs.length) % tabs.length;
      tabs[next].focus();
      show(next);
    });
  }

  function drawShares() {
    byId("shares").append(...chunks.map((chunk, index) => {
      const bar = (label) => make("td", { role: "cell", className: "share", "data-label": label },
        make("div", {}, make("span", { className: "track", "aria-hidden": "true" }, make("i")), make("span", { className: "num" })));
      return make("tr", { role: "row" },
        make("th", { role: "rowheader", scope: "row" },
          make("span", { className: "no" }, `${index + 1}`), make("a", { href: `#chunk-${index}` }, name(index)), make("span", { className: "badge" })),
        make("td", { role: "cell", className: "num" }, chunk.tokens.length.toLocaleString("en")),
        bar("of scores"), bar("of recomputed"));
    }));
  }

  function drawTokens() {
    const block = (index, title, id, tokens, images = []) => {
      const text = make("div", { className: "text", dir: "auto" });
      const first = spans.length;
      const imageAt = new Map(images.map((image) => [image.start, image]));
      for (let i = 0; i < tokens.length;) {
        const image = imageAt.get(i);
        const span = document.createElement("span");
        indexOf.set(span, first + i);
        const box = image && { from: first + i, to: first + image.stop, label: labelOf(image) };
        if (!image) span.textContent = tokens[i];
        for (const stop = image ? image.stop : i + 1; i < stop; i++) {
          if (box) boxOf[spans.length] = box;
          spans.push(span);
          chunkOf.push(index);
        }
        text.append(span);
      }
      const head = make("h4", {}, make("span", { className: "no" }, index < 0 ? "" : `${index + 1}`), title, make("small", {}, id));
      return make("section", { className: "chunk", id: index < 0 ? "prompt" : `chunk-${index}` }, head, make("p", { className: "note about" }), text);
    };
    chunks.forEach((chunk, index) => {
      starts.push(spans.length);
      byId("tokens").append(block(index, name(index), chunk.title ? chunk.id : "", chunk.tokens, chunk.images));
    });
    const prompt = block(-1, "Prompt", "", promptTokens);
    prompt.querySelector(".about").textContent = `${many(promptTokens.length, "token")} after the chunks, always computed`;
    if (promptTokens.length) byId("tokens").append(prompt);
    // Hundreds of sections: the browser lays out those in sight, and needs an idea of the height of the others.
    for (const section of byId("tokens").children) {
      const count = section.querySelector(".text").childElementCount;
      section.style.containIntrinsicHeight = `auto ${80 + Math.ceil(count / 16) * 29}px`;
    }
  }

  const labelOf = ({ tokens, tiles }) => `[image: ${many(tokens, "token")}${tiles > 1 ? ` in ${many(tiles, "tile")}` : ""}]`;

  // ---- what changes with the method ----

  function viewOf(index) {
    if (views.has(index)) return views.get(index);
    const method = methods[index];
    const made = { method, levels: new Uint8Array(spans.length), ranks: new Uint32Array(spans.length), scores: [], marks: new Uint8Array(spans.length), recomputed: [], ranked: 0 };
    method.chunks.forEach((chunk, c) => {
      let count = 0;
      for (let i = 0; i < chunk.recomputed.length; i++) {
        const at = starts[c] + i;
        if (chunk.recomputed[i] === "1") count += made.marks[at] = 1;
        if (chunk.scores) made.scores[at] = chunk.scores[i];
        if (chunk.ranks) made.ranks[at] = chunk.ranks[i];
      }
      made.recomputed.push(count);
      made.ranked += chunk.ranks ? chunk.ranks.length : 0;
    });
    const byRank = new Uint32Array(made.ranked + 1);
    made.ranks.forEach((rank, at) => { if (rank) byRank[rank] = at; });
    // Equal scores get one shade, that of the last of them: where all are equal, nothing stands out.
    let level = 0;
    for (let rank = made.ranked; rank > 0; rank--) {
      const last = rank === made.ranked || made.scores[byRank[rank]] !== made.scores[byRank[rank + 1]];
      if (last) level = levelOf(rank, made.ranked);
      made.levels[byRank[rank]] = level;
    }
    views.set(index, made);
    return made;
  }

  // A scale of ranks shows any kind of score, negative ones too; its logarithm keeps the few at the top apart.
  function levelOf(rank, ranked) {
    return ranked < 2 ? 0 : Math.round(LEVELS * (1 - Math.log(rank) / Math.log(ranked)));
  }

  function show(index) {
    view = viewOf(index);
    [...byId("tabs").children].forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
    });
    byId("panel").setAttribute("aria-labelledby", `tab-${index}`);
    hideTip();
    showFacts();
    showShares();
    showOrder();
    showScale();
    spans.forEach((span, at) => {
      if (boxOf[at]) {
        if (boxOf[at].from !== at) return;
        span.replaceChildren(boxOf[at].label, make("small", {}, saysOf(boxOf[at])));
      }
      const wanted = className(at);
      if (span.className !== wanted) span.className = wanted;
    });
  }

  function className(at) {
    const box = boxOf[at];
    if (box) return `t image${view.marks.subarray(box.from, box.to).includes(1) ? " r" : ""}`;
    const lines = spans[at].firstChild?.data.includes("\n") ? " nl" : "";
    if (chunkOf[at] < 0) return `t${lines}`;
    return `t s${view.levels[at]}${view.marks[at] ? " r" : ""}${lines}`;
  }

  // What the method did with an image: its tokens are told together, each would mean little alone.
  function saysOf(box) {
    const c = chunkOf[box.from];
    const chunk = view.method.chunks[c];
    const words = [chunk.exact ? "exact" : `${view.marks.subarray(box.from, box.to).reduce((sum, mark) => sum + mark, 0).toLocaleString("en")} recomputed`];
    if (chunk.scores) {
      const sum = (scores) => scores.reduce((total, score) => total + score, 0);
      const whole = sum(chunk.scores);
      const own = sum(chunk.scores.slice(box.from - starts[c], box.to - starts[c]));
      if (whole > 0) words.push(`${percent(chunk.mass * clip(own / whole))} of the scores`);
    }
    return words.join(" · ");
  }

  function showFacts() {
    const { method } = view;
    const { usage } = method;
    byId("rule").replaceChildren(make("b", {}, method.name), `: ${method.rule}. `, make("span", { className: "muted" }, `Source: ${method.source}.`));
    const facts = [
      `geometry ${method.geometry}`,
      `layers ${method.layers}`,
      method.reorder ? "chunks reordered" : "chunks in the given order",
      `${usage.cached_chunks} of ${many(usage.chunks, "chunk")} stored before`,
      `${many(usage.recomputed_tokens, "token")} recomputed of ${usage.reusable_tokens.toLocaleString("en")} reusable`,
      `${many(usage.prefilled_tokens, "token")} prefilled`,
      `${many(usage.new_tokens, "new token")}`,
      ...(method.reason ? [method.reason] : []),
    ];
    byId("facts").replaceChildren(...facts.map((fact) => make("span", {}, fact)));
  }

  function showShares() {
    const { method, recomputed } = view;
    const all = recomputed.reduce((sum, count) => sum + count, 0);
    const part = (c) => (all ? recomputed[c] / all : 0);
    const hasScores = method.chunks.some((chunk) => chunk.scores);
    const longest = Math.max(1e-9, ...method.chunks.map((chunk, c) => Math.max(hasScores ? chunk.mass : 0, part(c))));
    method.chunks.forEach((chunk, c) => {
      const row = byId("shares").children[c];
      [[hasScores, chunk.mass], [all > 0, part(c)]].forEach(([known, share], which) => {
        const cell = row.querySelectorAll(".share")[which];
        cell.classList.toggle("unknown", !known);
        cell.querySelector("i").style.width = known ? `${100 * clip(share / longest)}%` : "0";
        cell.querySelector(".num").textContent = known ? percent(share) : "–";
      });
      row.querySelector(".badge").textContent = chunk.exact ? "exact" : "";
      const place = method.order.indexOf(c);
      const words = [`${recomputed[c].toLocaleString("en")} of ${many(chunks[c].tokens.length, "token")} recomputed`];
      if (hasScores) words.push(`${percent(chunk.mass)} of the scores`);
      if (chunk.exact) words.push("exact: what stands before it is what stood before it when it was stored");
      if (place !== c) words.push(`moved to place ${place + 1}`);
      byId(`chunk-${c}`).querySelector(".about").textContent = words.join(" · ");
    });
  }

  function showOrder() {
    const { order, chunks: parts } = view.method;
    const moved = order.some((chunk, place) => chunk !== place);
    byId("reordered").hidden = !moved;
    if (!moved) return;
    const height = 28; // of a row, as in page.css
    const items = (list) => list.map((c) => make("li", { title: name(c) }, make("span", { className: "no" }, `${c + 1}`), make("span", {}, name(c))));
    const [before, svg, after] = byId("order").children;
    before.replaceChildren(...items(order.map((_, c) => c)));
    after.replaceChildren(...items(order));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 100 ${order.length * height}`);
    svg.style.height = `${order.length * height}px`;
    const largest = Math.max(1e-9, ...parts.map((part) => part.mass));
    order.forEach((c, place) => {
      const [from, to] = [(c + 0.5) * height, (place + 0.5) * height];
      const line = document.createElementNS(svg.namespaceURI, "path");
      line.setAttribute("d", `M2 ${from} C50 ${from} 50 ${to} 98 ${to}`);
      line.setAttribute("stroke-width", (1 + 4 * clip(parts[c].mass / largest)).toFixed(2));
      if (c === place) line.setAttribute("class", "still");
      svg.append(line);
    });
  }

  function showScale() {
    const { ranked, marks } = view;
    const items = [];
    let before = 0;
    for (let level = LEVELS; level > 0; level--) {
      // The last rank that still has this shade: the inverse of levelOf.
      const last = Math.floor(ranked ** (1 - (level - 0.5) / LEVELS) + 1e-9);
      if (ranked > 1 && last > before) items.push([level, `${last === before + 1 ? "" : "to "}${last.toLocaleString("en")}`]);
      before = Math.max(before, last);
    }
    const list = items.map(([level, label]) => make("li", {}, make("i", { className: `swatch s${level}` }), label));
    const lead = make("li", { className: "lead" }, list.length ? "rank" : marks.includes(1) ? "this method gives no scores" : "this method gives no scores and recomputes nothing");
    byId("scale").replaceChildren(lead, ...list);
  }

  // ---- one token ----

  const tip = byId("tip");
  let told = 0; // the token that the tip is about

  function showTip(at) {
    const { scores, ranks, ranked, marks, method } = view;
    const c = chunkOf[at];
    const lines = [];
    if (c < 0) lines.push("prompt, always computed");
    else if (boxOf[at]) {
      const own = ranks.subarray(boxOf[at].from, boxOf[at].to).filter((rank) => rank);
      lines.push(saysOf(boxOf[at]));
      if (own.length) lines.push(`best rank ${own.reduce((best, rank) => Math.min(best, rank)).toLocaleString("en")} of ${ranked.toLocaleString("en")}`);
      lines.push(`chunk ${c + 1}, tokens ${boxOf[at].from - starts[c] + 1} to ${boxOf[at].to - starts[c]}`);
    } else {
      if (scores[at] !== undefined) lines.push(`score ${scores[at]}`);
      if (ranks[at]) lines.push(`rank ${ranks[at].toLocaleString("en")} of ${ranked.toLocaleString("en")}`);
      lines.push(marks[at] ? "recomputed" : method.chunks[c].exact ? "exact, not up for choice" : "not recomputed");
      lines.push(`chunk ${c + 1}, token ${at - starts[c] + 1}`);
    }
    tip.replaceChildren(make("b", {}, boxOf[at]?.label ?? JSON.stringify(spans[at].textContent)), ...lines.map((line) => make("span", {}, line)));
    tip.hidden = false;
    told = at;
    placeTip();
  }

  function placeTip() {
    const box = spans[told].getClientRects()[0] ?? spans[told].getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - tip.offsetHeight - 8)}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  function moveTo(at) {
    spans[current].removeAttribute("tabindex");
    spans[current].removeAttribute("aria-describedby");
    current = indexOf.get(spans[at]);
    spans[at].tabIndex = 0;
    spans[at].setAttribute("aria-describedby", "tip");
  }

  function drawMoves() {
    const area = byId("tokens");
    const tokenOf = (event) => indexOf.get(event.target.closest(".t"));
    area.addEventListener("pointerover", (event) => (tokenOf(event) === undefined ? hideTip() : showTip(tokenOf(event))));
    area.addEventListener("pointerleave", hideTip);
    area.addEventListener("focusin", (event) => tokenOf(event) !== undefined && showTip(tokenOf(event)));
    area.addEventListener("focusout", hideTip);
    area.addEventListener("click", (event) => {
      if (tokenOf(event) === undefined || String(getSelection())) return; // selecting text stays possible
      moveTo(tokenOf(event));
      spans[current].focus({ preventScroll: true });
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hideTip();
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const onlyMarked = event.key === "ArrowDown" || event.key === "ArrowUp" || byId("only").checked;
      let next = current + step;
      while (spans[next] && spans[next] === spans[current]) next += step; // an image is one step
      while (onlyMarked && spans[next] && !view.marks[next]) next += step;
      if (!spans[next]) return;
      moveTo(next);
      spans[next].focus();
    });
    window.addEventListener("scroll", () => tip.hidden || placeTip(), { passive: true });
    byId("only").addEventListener("change", (event) => {
      area.classList.toggle("only", event.target.checked);
      const first = view.marks.indexOf(1);
      if (event.target.checked && !view.marks[current] && first >= 0) moveTo(first); // a hidden token cannot be reached
    });
    area.classList.toggle("only", byId("only").checked); // browsers keep a tick over a reload
    if (spans.length) moveTo(0);
  }

  function drawTheme() {
    const button = byId("theme");
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const label = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
    button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
    system.addEventListener("change", label);
    label();
    button.hidden = false;
  }

  drawTheme();
  drawTimings();
  drawTabs();
  drawShares();
  drawTokens();
  // The first method that has something to show.
  show(Math.max(0, methods.findIndex((method) => method.chunks.some((chunk) => chunk.ranks))));
  drawMoves();
  byId("drawn").hidden = false;
})();
