"""Processes by fork, of several kinds; each changes what it inherited."""

import hashlib
import multiprocessing
import os
import sys

context = multiprocessing.get_context("fork")
table = {n: str(n) for n in range(20000)}


def work(number, pipe):
    for n in range(0, 20000, 7):
        table[n] = "child"
    digest = hashlib.sha256("".join(table.values()).encode()).hexdigest()
    inner = context.Process(target=nested, args=(number,))
    inner.start()
    inner.join()
    pipe.send((number, digest, inner.exitcode))


def nested(number):
    table.clear()
    sys.exit(number % 5)


def square(number):
    table[number] = "pool"
    return number * number


def main():
    print("ready", flush=True)
    sys.stdin.readline()
    for begin in range(0, 40, 8):
        ends = []
        for number in range(begin, begin + 8):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(number, there))
            process.start()
            there.close()
            ends.append((process, here))
        for process, here in ends:
            print(here.recv())
            process.join()
            print("exit", process.exitcode)
    for number in range(150):
        pid = os.fork()
        if pid == 0:
            table[number] = None
            os._exit(number % 100)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != number % 100:
            print("status", status)
    if "threads" in sys.argv:
        # The pool's owner has threads that write while it forks.
        for _ in range(4):
            with context.Pool(4, maxtasksperchild=5) as pool:
                total = sum(pool.map(square, range(400), chunksize=5))
            # Not before: a child that a thread forks now would inherit what is not yet written.
            print(total)
    print("own", hashlib.sha256("".join(table.values()).encode()).hexdigest())
    print("checked", flush=True)
    sys.stdin.readline()
    print("end")


main()
