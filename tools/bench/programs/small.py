"""Some small programs such as interpreters are measured with."""
import ast
import json
import re
import zlib


def queens(n):
    def place(row, columns, left, right):
        if row == n:
            return 1
        return sum(
            place(row + 1, columns | 1 << c, left | 1 << row + c, right | 1 << row - c + n)
            for c in range(n)
            if not (columns >> c & 1 or left >> row + c & 1 or right >> row - c + n & 1)
        )

    return place(0, 0, 0, 0)


def bodies(steps):
    state = [[float(i), i * 0.5, 1.0 / (i + 1), 0.0, 0.0, 0.0] for i in range(5)]
    for _ in range(steps):
        for i, a in enumerate(state):
            for b in state[i + 1 :]:
                d = [a[k] - b[k] for k in range(3)]
                pull = 0.001 / (sum(x * x for x in d) + 0.01) ** 1.5
                for k in range(3):
                    a[3 + k] -= d[k] * pull
                    b[3 + k] += d[k] * pull
        for a in state:
            for k in range(3):
                a[k] += 0.01 * a[3 + k]
    return state


def words(rounds):
    text = " ".join(f"word{i * 7919 % 1009} = {i}" for i in range(4000))
    counts = {}
    for _ in range(rounds):
        for name, number in re.findall(r"(\w+) = (\d+)", text):
            counts[name] = counts.get(name, 0) + int(number)
    return sorted(counts.items(), key=lambda item: (item[1], item[0]))


def trees(rounds):
    source = "\n".join(f"def f{i}(a, b={i}):\n    return [x * a + b for x in range({i})]" for i in range(120))
    return [ast.unparse(compile(source, "x", "exec", ast.PyCF_ONLY_AST)) for _ in range(rounds)][-1]


def messages(rounds):
    value = {f"key{i}": [i, i / 3, str(i), None, {"deep": [True] * (i % 7)}] for i in range(300)}
    for _ in range(rounds):
        value = json.loads(json.dumps(value))
    return value


results = [queens(8), bodies(9000), words(60), trees(30), messages(150)]
print(zlib.crc32(repr(results).encode()))
