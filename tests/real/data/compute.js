// Generated code, garbage collection, threads, a child process; prints the same in every run.
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');
const { execFileSync } = require('node:child_process');
const crypto = require('node:crypto');
const zlib = require('node:zlib');

function primes(limit) {
  const sieve = new Uint8Array(limit + 1);
  let count = 0;
  for (let n = 2; n <= limit; n++) {
    if (sieve[n]) continue;
    count++;
    for (let m = n * n; m <= limit; m += n) sieve[m] = 1;
  }
  return count;
}

function churn(rounds) {
  let objects = [];
  let sum = 0;
  for (let i = 0; i < rounds; i++) {
    objects.push({ i, text: 'x' + i, list: [i, i + 1] });
    if (objects.length > 1000) objects = objects.filter((o) => o.i % 3 === 0).slice(-300);
    sum = (sum * 31 + objects.length) % 1000003;
  }
  return sum;
}

if (!isMainThread) {
  parentPort.postMessage([workerData, primes(300000 + workerData), churn(30000 + workerData)]);
} else if (process.argv[2] === 'child') {
  console.log('child', primes(100000));
} else {
  const work = [1, 2, 3, 4].map((n) => new Promise((done, fail) => {
    new Worker(__filename, { workerData: n }).on('message', done).on('error', fail);
  }));
  Promise.all(work).then((results) => {
    console.log(JSON.stringify(results));
    console.log(primes(2000000), churn(300000));
    console.log(execFileSync(process.execPath, [__filename, 'child']).toString().trim());
    console.log(execFileSync('/bin/sh', ['-c', 'echo $((6 * 7))']).toString().trim());
    const data = Buffer.from('text of several words '.repeat(5000));
    console.log(zlib.gunzipSync(zlib.gzipSync(data)).equals(data));
    console.log(crypto.createHash('sha256').update(data).digest('hex'));
    console.log('Größe 12,5'.normalize('NFD').replace(/[^ -~]/gu, '?'), 'abcabc'.match(/(?<two>bc)a/).groups.two);
    const wasm = new WebAssembly.Module(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1,
      127, 3, 2, 1, 0, 7, 7, 1, 3, 97, 100, 100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 32, 1, 106, 11]));
    console.log(new WebAssembly.Instance(wasm).exports.add(40, 2));
    try { null.field; } catch (error) { console.log(error.message); }
  });
}
