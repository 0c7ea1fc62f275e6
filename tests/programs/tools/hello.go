// Goroutines, the garbage collector, panics that are caught, traces with names.
package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
)

var table [1 << 20]uint64
var native = func(n int) int { return n * 2 }

func panics(n int) (text string) {
	defer func() {
		text = fmt.Sprint(recover(), " ", strings.Contains(string(debug.Stack()), "main.panics"))
	}()
	var list []int
	return fmt.Sprint(list[n])
}

func main() {
	var group sync.WaitGroup
	sums := make([]uint64, 16)
	for i := range sums {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			for round := 0; round < 50; round++ {
				kept := make([][]byte, 0)
				for n := 0; n < 100; n++ {
					kept = append(kept, make([]byte, 1000+n))
					table[i*4096+n] += uint64(len(kept[n]))
				}
				if round%10 == 0 {
					runtime.GC()
				}
			}
			sums[i] = table[i*4096+7]
		}(i)
	}
	group.Wait()
	fmt.Println(sums, panics(3), native(21))
	os.Exit(native(21))
}
