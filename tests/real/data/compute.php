<?php
// Classes, closures, generators, sorting, regular expressions, a forked process.
declare(strict_types=1);

interface Shape { public function area(): float; }
final class Circle implements Shape {
    public function __construct(private float $radius) {}
    public function area(): float { return M_PI * $this->radius ** 2; }
}
function numbers(int $seed, int $count): Generator {
    for ($i = 0; $i < $count; $i++) {
        $seed = ($seed * 1103515245 + 12345) % 2147483648;
        yield $i => $seed;
    }
}
$list = iterator_to_array(numbers(7, 200000));
usort($list, fn (int $a, int $b): int => $a % 1000 <=> $b % 1000 ?: $a <=> $b);
echo md5(implode(',', $list)), "\n";
$text = str_repeat("The quick brown fox, 42 times; ", 2000);
echo preg_match_all('/\b(\w+)\b[,;]/u', $text, $found), ' ', count(array_unique($found[1])), "\n";
echo strlen(serialize(array_chunk($list, 100))), ' ', crc32(json_encode(array_slice($list, 0, 5000))), "\n";
printf("%.6f %s\n", (new Circle(2.5))->area(), hash('sha256', $text));
$tree = null;
foreach (array_slice($list, 0, 20000) as $n) { $tree = ['next' => $n % 5 ? $tree : null, 'value' => $n]; }
for ($depth = 0; $tree; $tree = $tree['next']) { $depth++; }
echo $depth, ' ', memory_get_usage() < 1 << 30 ? 'fits' : 'too much', "\n";
try { intdiv(1, 0); } catch (DivisionByZeroError $e) { echo get_class($e), "\n"; }
echo trim(shell_exec('echo from the shell')), "\n";
if (function_exists('pcntl_fork')) {
    $child = pcntl_fork();
    if ($child === 0) {
        foreach ($list as &$n) { $n ^= 1; }
        exit(array_sum($list) % 100);
    }
    pcntl_waitpid($child, $status);
    echo 'child: ', pcntl_wexitstatus($status), "\n";
}
