"use strict";
// Draws the timelines. All of them share one window of time, [view.from, view.to] in nanoseconds.

const ROW = 22, HEAD = 22, RULER = 24, MAP = 16, MEMORY = 168;
const root = document.documentElement;
const tip = document.getElementById("tip");
const data = JSON.parse(document.getElementById("data").textContent);
const whole = Math.max(1, ...data.map((one) => one.step));
const view = { from: 0, to: whole };
const state = { colour: "phase", find: "", cross: null };
const panels = [];

// What comes in differences is made absolute once; typed arrays keep tens of thousands of ops quick.
function absolute(steps) {
  const found = new Float64Array(steps.length);
  let sum = 0;
  for (let i = 0; i < steps.length; i++) found[i] = sum += steps[i];
  return found;
}

function unpack(one) {
  for (const group of one.classes) {
    for (const lane of group.lanes) {
      lane.start = absolute(lane.t);
      lane.end = Float64Array.from(lane.d, (length, i) => lane.start[i] + length);
      // Seconds of all ops before each, so that what fills a pixel is one subtraction.
      lane.before = new Float64Array(lane.d.length + 1);
      lane.d.forEach((length, i) => { lane.before[i + 1] = lane.before[i] + length; });
    }
    for (const tier of Object.keys(group.memory)) group.memory[tier] = levels(group.memory[tier], one.kinds.length);
  }
}

function levels(changes, kinds) {
  const times = absolute(changes.t), count = times.length;
  const by = Array.from({ length: kinds }, () => new Float64Array(count));
  const total = new Float64Array(count), now = new Float64Array(kinds);
  let sum = 0, peak = 0;
  for (let i = 0; i < count; i++) {
    now[changes.k[i]] += changes.b[i];
    sum += changes.b[i];
    for (let k = 0; k < kinds; k++) by[k][i] = now[k];
    total[i] = sum;
    if (sum > total[peak]) peak = i;
  }
  const used = by.map((values) => values.some((value) => value > 0));
  return { times, by, total, peak, used };
}

// The first place whose value is above the limit.
function above(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function duration(nano) {
  const size = Math.abs(nano);
  if (size === 0) return "0";
  for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (size >= scale) return `${(nano / scale).toPrecision(size / scale < 1000 ? 3 : 4)} ${unit}`;
  return `${Math.round(nano)} ns`;
}

function bytes(count) {
  let value = count, unit = 0;
  while (Math.abs(value) >= 1024 && unit < 5) { value /= 1024; unit++; }
  return `${unit ? value.toFixed(1) : value} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

// A step of 1, 2 or 5 of a power of ten that gives about so many ticks.
function tick(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => span / step <= most);
}

const paints = new Map();
function paint(name) {
  if (!paints.has(name)) {
    const value = getComputedStyle(root).getPropertyValue(`--${name || "other"}`).trim();
    paints.set(name, value || getComputedStyle(root).getPropertyValue("--other").trim());
  }
  return paints.get(name);
}

// Black or white, whichever reads better on a colour that is written #rrggbb.
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return red * .299 + green * .587 + blue * .114 > 165 ? "#1b2430" : "#fff";
}

class Panel {
  constructor(one, section) {
    this.one = one;
    this.section = section;
    this.lanes = section.querySelector(".lanes canvas");
    this.memory = section.querySelector(".memory canvas");
    this.picked = section.querySelector(".picked");
    [this.classPick, this.tierPick] = section.querySelectorAll(".memory-head select");
    this.legend = section.querySelector(".memory-head .legend");
    this.rows = [];
    let y = MAP + RULER;
    one.classes.forEach((group, g) => {
      if (one.classes.length > 1) { this.rows.push({ group, g, y, head: true }); y += HEAD; }
      for (const lane of group.lanes) { this.rows.push({ group, g, lane, y }); y += ROW; }
    });
    this.height = y + 4;
    this.choice = { row: this.rows.findIndex((row) => row.lane), at: -1 };
    one.classes.forEach((group, g) => this.classPick.add(new Option(group.ranks, g)));
    const tiers = [...new Set(one.classes.flatMap((group) => Object.keys(group.memory)))];
    tiers.forEach((tier) => this.tierPick.add(new Option(`${tier} memory`, tier)));
    this.classPick.hidden = one.classes.length < 2;
    this.tierPick.hidden = tiers.length < 2;
    if (!tiers.length) section.querySelectorAll(".memory, .memory-head").forEach((part) => { part.hidden = true; });
    const fullest = one.classes.map((group) => peakOf(group.memory[tiers[0]]));
    this.classPick.value = Math.max(0, fullest.indexOf(Math.max(...fullest)));
    for (const pick of [this.classPick, this.tierPick]) pick.addEventListener("change", () => this.drawMemory());
    this.listen();
  }

  get gutter() { return this.width < 560 ? 76 : 132; }
  x(time) { return this.gutter + (time - view.from) / (view.to - view.from) * (this.width - this.gutter); }
  time(x) { return view.from + (x - this.gutter) / (this.width - this.gutter) * (view.to - view.from); }

  size(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(260, canvas.parentElement.clientWidth);
    canvas.style.height = `${height}px`;
    const wide = Math.round(this.width * ratio), high = Math.round(height * ratio);
    if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  draw() { this.drawLanes(); this.drawMemory(); }

  colourOf(label) {
    const [, , phase, kind] = this.one.labels[label];
    return paint(this.one.names[state.colour === "phase" ? phase : kind]);
  }

  matches(label) {
    if (!this.found || this.found.text !== state.find) {
      const text = state.find.toLowerCase();
      const named = (row) => [row[0], row[1]].some((name) => this.one.names[name].toLowerCase().includes(text));
      this.found = { text: state.find, rows: this.one.labels.map(named) };
    }
    return !state.find || this.found.rows[label];
  }

  drawLanes() {
    const pen = this.size(this.lanes, this.height), { width, gutter } = this;
    this.drawMap(pen);
    this.drawRuler(pen);
    this.rows.forEach((row, at) => {
      const chosen = document.activeElement === this.lanes && at === this.choice.row;
      pen.textAlign = "left";
      if (row.head) {
        pen.fillStyle = paint("ink");
        pen.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
        pen.fillText(row.group.ranks, 2, row.y + HEAD / 2 + 2);
        pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
        return;
      }
      pen.fillStyle = paint(chosen ? "accent" : "soft");
      pen.fillText(clip(pen, row.lane.name, gutter - 10), 2, row.y + ROW / 2);
      pen.fillStyle = paint("grid");
      pen.fillRect(gutter, row.y + ROW - 1, width - gutter, 1);
      this.drawLane(pen, row);
    });
    if (state.cross !== null) this.drawCross(pen, this.height);
  }

  drawLane(pen, { lane, y }) {
    const { width, gutter } = this, scale = (width - gutter) / (view.to - view.from);
    pen.save();
    pen.beginPath();
    pen.rect(gutter, y, width - gutter, ROW);
    pen.clip();
    // Ops narrower than a pixel are drawn a pixel at a time, as pale as they leave it empty, in the colour of the first;
    // equal neighbours in one stroke. So a frame costs what the screen is wide, however many ops there are.
    let run = null;
    const flush = () => {
      if (!run) return;
      pen.globalAlpha = run.pale;
      pen.fillStyle = run.colour;
      pen.fillRect(run.from, y + 2, run.to - run.from, ROW - 5);
      pen.globalAlpha = 1;
      run = null;
    };
    for (let i = above(lane.end, view.from); i < lane.start.length; i++) {
      const waited = lane.w ? lane.w[i] : 0;
      if (lane.start[i] - waited > view.to) break;
      const left = gutter + (lane.start[i] - view.from) * scale, right = gutter + (lane.end[i] - view.from) * scale;
      if (waited * scale > 1) {
        pen.fillStyle = pattern(pen);
        pen.fillRect(left - waited * scale, y + 5, waited * scale, ROW - 10);
      }
      if (lane.end[i] === lane.start[i]) continue;
      const colour = this.colourOf(lane.l[i]), shown = this.matches(lane.l[i]);
      if (right - left < 1) {
        const column = Math.floor(left);
        const next = Math.max(i + 1, above(lane.end, view.from + (column + 1 - gutter) / scale));
        const filled = Math.min(1, Math.ceil((lane.before[next] - lane.before[i]) * scale * 5) / 5);
        const pale = shown ? Math.max(.3, filled) : .13;
        if (run && run.colour === colour && run.pale === pale && column === run.to) run.to = column + 1;
        else { flush(); run = { from: column, to: column + 1, colour, pale }; }
        i = next - 1;
        continue;
      }
      flush();
      this.drawOp(pen, lane.l[i], left, right, y, colour, shown);
    }
    flush();
    const chosen = this.rows[this.choice.row], at = this.choice.at;
    if (chosen && chosen.lane === lane && at >= 0) {
      pen.strokeStyle = paint("ink");
      pen.lineWidth = 2;
      pen.strokeRect(this.x(lane.start[at]), y + 2, Math.max(3, (lane.end[at] - lane.start[at]) * scale), ROW - 5);
    }
    pen.restore();
  }

  drawOp(pen, label, left, right, y, colour, shown) {
    const wide = right - left;
    pen.globalAlpha = shown ? 1 : .13;
    pen.fillStyle = colour;
    pen.fillRect(left, y + 2, wide > 4 ? wide - .6 : wide, ROW - 5);
    if (wide > 34 && shown) {
      const from = Math.max(left, this.gutter), room = Math.min(right, this.width) - from - 8;
      pen.fillStyle = inkOn(colour);
      pen.fillText(clip(pen, this.one.names[this.one.labels[label][0]], room), from + 4, y + ROW / 2);
    }
    pen.globalAlpha = 1;
  }

  // The whole step in small: the first lane, and the part of it that is shown.
  drawMap(pen) {
    const { width, gutter } = this, room = width - gutter, first = this.rows.find((row) => row.lane);
    pen.fillStyle = paint("grid");
    pen.fillRect(gutter, 0, room, MAP - 4);
    if (first) {
      let drawn = -Infinity;
      first.lane.start.forEach((start, i) => {
        const left = start / whole * room, right = first.lane.end[i] / whole * room;
        if (Math.max(right, left + 1) <= drawn) return;
        pen.fillStyle = this.colourOf(first.lane.l[i]);
        pen.fillRect(gutter + left, 3, Math.max(1, right - left), MAP - 10);
        drawn = Math.max(Math.ceil(left), right);
      });
    }
    if (view.from <= 0 && view.to >= whole) return;
    pen.strokeStyle = paint("accent");
    pen.lineWidth = 2;
    const left = view.from / whole * room, wide = (view.to - view.from) / whole * room;
    pen.strokeRect(gutter + left + 1, 1, Math.max(4, wide) - 2, MAP - 6);
  }

  drawRuler(pen) {
    const { width, gutter } = this, step = tick(view.to - view.from, Math.max(2, (width - gutter) / 100));
    pen.textAlign = "center";
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = this.x(time);
      pen.fillStyle = paint("grid");
      pen.fillRect(x, MAP + RULER - 6, 1, this.height);
      pen.fillStyle = paint("soft");
      const half = pen.measureText(label(time, step)).width / 2;
      if (x - half > gutter - 20 && x + half < width) pen.fillText(label(time, step), x, MAP + RULER / 2 - 2);
    }
    if (this.one.step < view.to && this.one.step > view.from) {
      pen.fillStyle = paint("accent");
      pen.fillRect(this.x(this.one.step), MAP + RULER - 8, 1.5, this.height);
    }
  }

  drawCross(pen, height) {
    if (state.cross < view.from || state.cross > view.to) return;
    pen.fillStyle = paint("accent");
    pen.globalAlpha = .7;
    pen.fillRect(Math.round(this.x(state.cross)), 0, 1, height);
    pen.globalAlpha = 1;
  }

  curve() {
    const group = this.one.classes[Number(this.classPick.value)];
    return group && group.memory[this.tierPick.value];
  }

  drawMemory() {
    const curve = this.curve();
    if (!curve || !curve.times.length) return;
    const pen = this.size(this.memory, MEMORY), { width, gutter } = this, low = MEMORY - 6, high = 14;
    const most = curve.total[curve.peak], has = this.one.capacity[this.tierPick.value];
    const top = has && has < most * 2 ? Math.max(has, most) * 1.04 : most * 1.08;
    const y = (count) => low - count / top * (low - high);
    this.legend.innerHTML = "";
    pen.textAlign = "right";
    const step = 2 ** Math.ceil(Math.log2(top / 4));
    for (let count = 0; count <= top; count += step) {
      pen.fillStyle = paint("grid");
      pen.fillRect(gutter, y(count), width - gutter, 1);
      pen.fillStyle = paint("soft");
      pen.fillText(bytes(count), gutter - 6, Math.max(high, y(count) - (count ? 0 : 4)));
    }
    const columns = this.columns(curve);
    const base = new Float64Array(columns.length);
    this.one.kinds.forEach((kind, k) => {
      if (!curve.used[k]) return;
      chip(this.legend, kind);
      pen.beginPath();
      columns.forEach((at, column) => { pen.lineTo(gutter + column, y(base[column])); pen.lineTo(gutter + column + 1, y(base[column])); });
      for (let column = columns.length - 1; column >= 0; column--) {
        base[column] += columns[column] < 0 ? 0 : curve.by[k][columns[column]];
        pen.lineTo(gutter + column + 1, y(base[column]));
        pen.lineTo(gutter + column, y(base[column]));
      }
      pen.closePath();
      pen.fillStyle = paint(kind);
      pen.fill();
    });
    this.line(pen, y(most), paint("ink"), `peak ${bytes(most)} at ${duration(curve.times[curve.peak])}`, this.x(curve.times[curve.peak]));
    if (has && has < most * 2) this.line(pen, y(has), paint("warn"), `the device has ${bytes(has)}`, width);
    if (state.cross !== null) this.drawCross(pen, MEMORY);
  }

  line(pen, y, colour, text, x) {
    const { width, gutter } = this, wide = pen.measureText(text).width;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1;
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(gutter, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.fillText(text, Math.min(Math.max(x + 6, gutter + 4), width - wide - 4), y - 7);
  }

  // For each pixel the change after which most is held, so that no peak is lost between two pixels.
  columns(curve) {
    const count = Math.max(1, Math.floor(this.width - this.gutter)), found = new Int32Array(count);
    const end = above(curve.times, Math.min(view.to, this.one.step));
    let next = above(curve.times, view.from);
    for (let column = 0; column < count; column++) {
      const until = this.time(this.gutter + column + 1);
      let best = next - 1;
      if (this.time(this.gutter + column) > this.one.step) { found[column] = -1; continue; }
      while (next < end && curve.times[next] <= until) {
        if (best < 0 || curve.total[next] > curve.total[best]) best = next;
        next++;
      }
      found[column] = best;
    }
    return found;
  }

  // The row and op at a place, or null; ops of less than three pixels may be missed by two.
  at(x, y) {
    const r = this.rows.findIndex((row) => row.lane && y >= row.y && y < row.y + ROW);
    if (r < 0 || x < this.gutter) return null;
    const lane = this.rows[r].lane, time = this.time(x), near = this.time(x + 2) - time;
    let best = -1, least = near;
    const i = above(lane.end, time);
    for (const one of [i - 1, i]) {
      if (one < 0 || one >= lane.start.length) continue;
      const waited = lane.w ? lane.w[one] : 0;
      const off = Math.max(lane.start[one] - waited - time, time - lane.end[one], 0);
      if (off <= least && lane.end[one] > lane.start[one] - waited) { least = off; best = one; }
    }
    return best < 0 ? null : { row: r, at: best };
  }

  describe({ row, at }) {
    const { lane, group } = this.rows[row], [name, module, phase, kind, more] = this.one.labels[lane.l[at]].map((n) => this.one.names[n]);
    const lines = [module || "(no module)", [phase, kind, lane.name].filter(Boolean).join(" · ")];
    lines.push(`${duration(lane.end[at] - lane.start[at])} from ${duration(lane.start[at])} · ${this.one.word}`);
    if (lane.w && lane.w[at]) lines.push(`waited ${duration(lane.w[at])} for other ranks before it`);
    if (more) lines.push(more);
    if (this.one.classes.length > 1) lines.push(group.ranks);
    return [name, lines];
  }

  holds(time) {
    const curve = this.curve();
    if (!curve) return [];
    const at = above(curve.times, time) - 1;
    if (at < 0 || time > this.one.step) return [];
    const kinds = this.one.kinds.map((kind, k) => [kind, curve.by[k][at]]).filter(([, held]) => held);
    return [`${bytes(curve.total[at])} at ${duration(time)}`, kinds.map(([kind, held]) => `${kind} ${bytes(held)}`)];
  }

  choose(choice) {
    this.choice = choice;
    this.tell();
    this.drawLanes();
  }

  tell() {
    if (this.choice.at < 0) { this.picked.textContent = ""; return; }
    const [name, lines] = this.describe(this.choice);
    this.picked.textContent = `${name}: ${lines.join("; ")}`;
  }

  listen() {
    const pointers = new Map();
    let moved = 0, pinch = 0, map = false;
    const place = (event, canvas) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    for (const canvas of [this.lanes, this.memory]) {
      canvas.addEventListener("pointerdown", (event) => {
        const [x, y] = place(event, canvas);
        pointers.set(event.pointerId, x);
        canvas.setPointerCapture(event.pointerId);
        moved = 0;
        map = canvas === this.lanes && y < MAP;
        if (map) this.toMap(x);
      });
      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = place(event, canvas), before = pointers.get(event.pointerId);
        if (before !== undefined) {
          if (map) { this.toMap(x); pointers.set(event.pointerId, x); return; }
          const others = [...pointers].filter(([id]) => id !== event.pointerId);
          if (others.length) {
            const apart = Math.abs(x - others[0][1]);
            if (pinch) zoom(pinch / Math.max(10, apart), this.time((x + others[0][1]) / 2));
            pinch = Math.max(10, apart);
          } else {
            moved += Math.abs(x - before);
            pan(-(x - before) / (this.width - this.gutter));
          }
          pointers.set(event.pointerId, x);
        }
        state.cross = x > this.gutter ? this.time(x) : null;
        this.hover(event, canvas, x, y);
        redraw();
      });
      for (const type of ["pointerup", "pointercancel"]) canvas.addEventListener(type, (event) => {
        const [x, y] = place(event, canvas);
        pointers.delete(event.pointerId);
        pinch = 0;
        if (type === "pointerup" && canvas === this.lanes && moved < 4 && !map) this.choose(this.at(x, y) || { row: this.choice.row, at: -1 });
        map = false;
      });
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; state.cross = null; redraw(); });
      canvas.addEventListener("wheel", (event) => {
        const [x] = place(event, canvas);
        if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 240), this.time(x));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 900);
        else return;
        event.preventDefault();
      }, { passive: false });
    }
    this.lanes.addEventListener("dblclick", (event) => {
      const found = this.at(...place(event, this.lanes));
      if (found) { this.choose(found); this.focusOn(found); }
    });
    this.lanes.addEventListener("keydown", (event) => this.key(event));
    for (const type of ["focus", "blur"]) this.lanes.addEventListener(type, () => this.drawLanes());
  }

  toMap(x) {
    const middle = (x - this.gutter) / (this.width - this.gutter) * whole, half = (view.to - view.from) / 2;
    window_(middle - half, middle + half);
  }

  focusOn({ row, at }) {
    const lane = this.rows[row].lane, length = Math.max(lane.end[at] - lane.start[at], 1);
    window_(lane.start[at] - length, lane.end[at] + length);
  }

  key(event) {
    const lane = this.rows[this.choice.row] && this.rows[this.choice.row].lane;
    const go = (by) => {
      if (!lane || !lane.start.length) return;
      const fresh = by > 0 ? above(lane.end, view.from) : above(lane.start, view.to) - 1;
      const at = this.choice.at < 0 ? fresh : this.choice.at + by;
      const kept = Math.min(lane.start.length - 1, Math.max(0, at));
      this.choose({ row: this.choice.row, at: kept });
      if (lane.end[kept] < view.from || lane.start[kept] > view.to) {
        const half = (view.to - view.from) / 2;
        window_(lane.start[kept] - half, lane.start[kept] + half);
      }
    };
    const move = (by) => {
      let row = this.choice.row + by;
      while (this.rows[row] && !this.rows[row].lane) row += by;
      if (this.rows[row]) this.choose({ row, at: -1 });
    };
    const keys = {
      ArrowLeft: () => pan(-.15), a: () => pan(-.15), ArrowRight: () => pan(.15), d: () => pan(.15),
      "+": () => zoom(.6), "=": () => zoom(.6), w: () => zoom(.6), "-": () => zoom(1 / .6), s: () => zoom(1 / .6),
      0: fit, Home: fit, ArrowUp: () => move(-1), ArrowDown: () => move(1), ",": () => go(-1), ".": () => go(1),
      Enter: () => this.choice.at >= 0 && this.focusOn(this.choice),
      Escape: () => this.choose({ row: this.choice.row, at: -1 }),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  }

  hover(event, canvas, x, y) {
    const lines = [];
    let name = "";
    if (canvas === this.lanes) {
      const found = this.at(x, y);
      if (found) { const [head, told] = this.describe(found); name = head; lines.push(...told); }
    } else if (x > this.gutter) {
      const [head, told] = this.holds(this.time(x));
      if (head) { name = head; lines.push(...told); }
    }
    tip.hidden = !name;
    if (!name) return;
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }));
    for (const line of lines) tip.append(Object.assign(document.createElement("span"), { textContent: line }));
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 8))}px`;
    tip.style.top = `${event.clientY + 18 + high > innerHeight ? Math.max(4, event.clientY - high - 12) : event.clientY + 18}px`;
  }
}

function peakOf(curve) { return curve && curve.times.length ? curve.total[curve.peak] : 0; }

function clip(pen, text, room) {
  if (room < 14) return "";
  if (pen.measureText(text).width <= room) return text;
  let length = Math.floor(text.length * room / pen.measureText(text).width);
  while (length > 0 && pen.measureText(`${text.slice(0, length)}…`).width > room) length--;
  return length ? `${text.slice(0, length)}…` : "";
}

function label(time, step) {
  const [unit, scale] = step >= 1e9 ? ["s", 1e9] : step >= 1e5 ? ["ms", 1e6] : step >= 100 ? ["µs", 1e3] : ["ns", 1];
  return `${(time / scale).toFixed(Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9)))} ${unit}`;
}

// Stripes for the time in which a collective waits for other ranks.
let stripes = null;
function pattern(pen) {
  if (!stripes) {
    const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 }), on = tile.getContext("2d");
    on.strokeStyle = paint("other");
    on.beginPath();
    for (const shift of [-6, 0, 6]) { on.moveTo(shift, 6); on.lineTo(shift + 6, 0); }
    on.stroke();
    stripes = pen.createPattern(tile, "repeat");
  }
  return stripes;
}

function chip(legend, name, shown = name) {
  const one = document.createElement("span"), mark = document.createElement("i");
  mark.style.background = paint(name);
  one.append(mark, shown);
  legend.append(one);
}

function window_(from, to) {
  const length = Math.min(whole, Math.max(to - from, 100));
  view.from = Math.min(Math.max(0, from), whole - length);
  view.to = view.from + length;
  redraw();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  window_(around - (around - view.from) * factor, around + (view.to - around) * factor);
}
function pan(share) {
  const by = share * (view.to - view.from);
  window_(view.from + by, view.to + by);
}
function fit() { window_(0, whole); }

let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; panels.forEach((panel) => panel.draw()); });
}

function drawLegend() {
  const legend = document.getElementById("legend"), seen = new Map();
  for (const one of data)
    for (const group of one.classes)
      for (const lane of group.lanes)
        for (const at of lane.l) {
          const row = one.labels[at], name = one.names[row[state.colour === "phase" ? 2 : 3]];
          seen.set(name, (seen.get(name) || 0) + 1);
        }
  legend.replaceChildren();
  for (const name of seen.keys()) chip(legend, name, name || "other");
  if (data.some((one) => one.classes.some((group) => group.lanes.some((lane) => lane.w)))) {
    const one = document.createElement("span");
    one.textContent = "▨ waits for other ranks";
    legend.append(one);
  }
}

function recolour() {
  paints.clear();
  stripes = null;
  drawLegend();
  redraw();
}

data.forEach(unpack);
document.querySelectorAll("section.timeline").forEach((section) => panels.push(new Panel(data[section.dataset.number], section)));
document.querySelectorAll("[data-do]").forEach((button) => {
  const act = { in: () => zoom(.6), out: () => zoom(1 / .6), left: () => pan(-.3), right: () => pan(.3), fit }[button.dataset.do];
  button.addEventListener("click", act);
});
document.getElementById("colour").addEventListener("change", (event) => { state.colour = event.target.value; recolour(); });
document.getElementById("find").addEventListener("input", (event) => { state.find = event.target.value; redraw(); });
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("resize", redraw);
drawLegend();
redraw();
