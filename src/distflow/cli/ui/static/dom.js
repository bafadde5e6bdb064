// Creates elements, and formats values as texts. Texts become text nodes, so no name or output can become markup.

const SVG = new Set(['svg', 'g', 'rect', 'path', 'text', 'title']);

export function h(tag, props, ...children) {
  const isSvg = SVG.has(tag);
  const element = isSvg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(9).filter((child) => child != null && child !== false));
  return element;
}

// A message with its `commands` as code.
export const withCode = (text) => text.split('`').map((part, index) => (index % 2 ? h('code', {}, part) : part));

// Replaces the children of an element. Keeps the focus and open details, if the new children have elements with the same key.
export function render(parent, ...children) {
  const keyOf = (element) => element?.getAttribute?.('data-key') ?? element?.getAttribute?.('href');
  const focused = parent.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const open = new Set([...parent.querySelectorAll('details[open]')].map(keyOf));
  parent.replaceChildren(...children.flat(9).filter((child) => child != null && child !== false));
  for (const one of parent.querySelectorAll('details')) if (open.has(keyOf(one))) one.open = true;
  if (focused)
    [...parent.querySelectorAll('[data-key], [href]')].find((one) => keyOf(one) === focused)?.focus({ preventScroll: true });
}

export const seconds = (iso) => (iso ? Date.parse(iso) / 1000 : null);
// In a report, the time at which it was written.
let frozen = null;
export const freeze = (at) => {
  frozen = at;
};
export const nowSeconds = () => frozen ?? Date.now() / 1000;

export function duration(value) {
  if (value == null || !Number.isFinite(value)) return '–';
  if (value > 0 && value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${Number(value.toFixed(1))} s`;
  const [days, hours, minutes, rest] = [value / 86400, (value / 3600) % 24, (value / 60) % 60, value % 60].map(Math.floor);
  const two = (number) => String(number).padStart(2, '0');
  return days ? `${days} d ${hours} h` : hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function ago(iso) {
  const past = nowSeconds() - seconds(iso);
  const [count, unit] =
    past < 60
      ? [past, 'second']
      : past < 3600
        ? [past / 60, 'minute']
        : past < 86400
          ? [past / 3600, 'hour']
          : [past / 86400, 'day'];
  return new Intl.RelativeTimeFormat('en', { numeric: 'auto', style: 'short' }).format(-Math.max(0, Math.floor(count)), unit);
}

export function bytes(value) {
  if (value == null) return '–';
  let number = value,
    unit = 0;
  while (number >= 1024 && unit < 5) {
    number /= 1024;
    unit += 1;
  }
  return unit
    ? `${number.toFixed(number < 100 ? 1 : 0)} ${['', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}`
    : `${Math.round(value)} B`;
}

export function amount(value) {
  if (value == null) return '';
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  const [divisor, unit] = size >= 1e12 ? [1e12, 'T'] : size >= 1e9 ? [1e9, 'G'] : size >= 1e6 ? [1e6, 'M'] : [1, ''];
  return `${Number((value / divisor).toPrecision(size < 1000 || unit ? 4 : 6))}${unit}`;
}

export const clock = (iso, millis = false) => {
  if (!iso) return '';
  const options = { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false };
  return new Date(iso).toLocaleTimeString('en-GB', millis ? { ...options, fractionalSecondDigits: 3 } : options);
};
export const day = (iso) => (iso ? `${new Date(iso).toLocaleDateString('en-CA')} ${clock(iso)}` : '');

export function tone(status) {
  if (status === 'COMPLETED') return 'good';
  if (status === 'FAILED_CANCELED' || status === 'FAILED_UPSTREAM') return 'quiet';
  if (status?.startsWith('FAILED')) return 'bad';
  return status === 'RUNNING' ? 'live' : 'wait';
}
export const wordOf = (status) => (status === 'FAILED_CANCELED' ? 'canceled' : status.replaceAll('_', ' ').toLowerCase());
export const badge = (status) => h('span', { class: `badge ${tone(status)}`, title: status }, wordOf(status));

// Returns the ranks of a text such as '8-15'.
export function ranksOf(text) {
  const [first, last] = (text || '').split('-').map(Number);
  return text ? Array.from({ length: (last ?? first) - first + 1 }, (_, index) => first + index) : [];
}

const ESCAPE = /\x1b\[([\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b./g;
export const withoutEscapes = (line) => line.replace(ESCAPE, '');

// Splits a line with the escape sequences of a terminal into elements: 16 colors, bold, dim, italic and underlined text.
export function ansi(line) {
  if (!line.includes('\x1b')) return [line];
  const classes = new Set(),
    found = [];
  let at = 0;
  const put = (end) => {
    const text = line.slice(at, end);
    if (text) found.push(classes.size ? h('span', { class: [...classes].join(' ') }, text) : text);
  };
  const color = (side, number) => {
    for (const one of [...classes]) if (one.startsWith(side)) classes.delete(one);
    if (number != null) classes.add(side + number);
  };
  for (const match of line.matchAll(ESCAPE)) {
    put(match.index);
    at = match.index + match[0].length;
    if (match[2] !== 'm') continue;
    const codes = (match[1] || '0').split(';').map(Number);
    while (codes.length) {
      const code = codes.shift();
      if (code === 0) classes.clear();
      else if (code === 38 || code === 48) {
        const [kind, number] = codes.splice(0, codes[0] === 2 ? 4 : 2);
        color(code === 38 ? 'fg' : 'bg', kind === 5 && number < 16 ? number : null);
      } else if ([1, 2, 3, 4].includes(code)) classes.add(`st${code}`);
      else if (code === 22) {
        classes.delete('st1');
        classes.delete('st2');
      } else if (code === 39 || code === 49) color(code === 39 ? 'fg' : 'bg', null);
      else
        for (const [base, side, plus] of [
          [30, 'fg', 0],
          [40, 'bg', 0],
          [90, 'fg', 8],
          [100, 'bg', 8],
        ])
          if (code >= base && code < base + 8) color(side, code - base + plus);
    }
  }
  put(line.length);
  return found;
}
