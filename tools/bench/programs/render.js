// A page rendered on a server, again and again: data is parsed, sorted, put into nested templates,
// escaped and serialised; each round compiles its templates anew, as after a deployment.
'use strict';
const vm = require('vm');

const ROUNDS = 40, PRODUCTS = 400, COMPONENTS = 120;

let state = 1;
function below(bound) {
  state = (Math.imul(state, 1103515245) + 12345) >>> 0;
  return (state >>> 8) % bound;
}

function component(name, round) {
  const fields = ['title', 'price', 'stock', 'tags', 'notes'];
  const a = fields[below(5)], b = fields[below(5)];
  return `function ${name}(item, depth) {
    const { ${a}: left${a === b ? '' : `, ${b}: right`} } = item;
    const rest = ${a === b ? 'left' : 'right'};
    let out = '<div class="${name} r${round}" data-depth="' + depth + '">';
    switch (typeof left) {
      case 'string': out += escape(left.replace(/([a-z]+)([0-9]+)/g, '$2-$1')); break;
      case 'number': out += left.toFixed(${1 + below(3)}); break;
      default: out += Array.from(left, (x, i) => i + ':' + escape(String(x))).join(', ');
    }
    try { out += '<i>' + escape(JSON.stringify(rest)) + '</i>'; } catch { out += '?'; }
    if (depth > 0) out += components[(depth * 7 + ${below(COMPONENTS)}) % components.length](item, depth - 1);
    return out + '</div>';
  }`;
}

const escapes = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
const escape = (text) => text.replace(/[&<>"]/g, (c) => escapes[c]);

let sum = 0;
for (let round = 0; round < ROUNDS; round++) {
  const names = Array.from({ length: COMPONENTS }, (_, i) => `c${round}_${i}`);
  const source = `const components = [];\n${names.map((n) => component(n, round)).join('\n')}
    components.push(${names.join(', ')}); components`;
  const components = new vm.Script(source).runInNewContext({ escape });
  const text = JSON.stringify(Array.from({ length: PRODUCTS }, (_, i) => ({
    title: `<product${i}> ${below(1e6)}`, price: below(1e5) / 7, stock: below(99),
    tags: Array.from({ length: below(6) }, () => `t${below(40)}`), notes: 'x & y '.repeat(below(9)),
  })));
  const items = JSON.parse(text).sort((a, b) => (a.title < b.title ? -1 : 1));
  const page = items.map((item, i) => components[i % COMPONENTS](item, 3)).join('\n');
  for (let i = 0; i < page.length; i += 17) sum = (Math.imul(sum, 31) + page.charCodeAt(i)) | 0;
}
console.log(sum);
