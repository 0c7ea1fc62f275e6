//! Source code for compilers to work at.

use std::fmt::Write as _;

/// A program of `functions` functions that keep an optimiser busy; 16 lines each.
pub(crate) fn c_source(functions: u32) -> String {
    let mut text = String::new();
    for i in 0..functions {
        let _ = write!(
            text,
            "static int f{i}(int *a, int n, int k) {{\n\
             \x20   int s = {i}, t = k;\n\
             \x20   for (int j = 0; j < n; j++) {{\n\
             \x20       switch ((a[j] ^ k) & 7) {{\n\
             \x20       case 0: s += a[j] * {}; break;\n\
             \x20       case 1: s ^= t << {}; break;\n\
             \x20       case 2: t -= s / {}; break;\n\
             \x20       case 3: if (s > t) s -= a[(j + {i}) % n]; break;\n\
             \x20       case 5: t = s % {};\n\
             \x20       default: s = s * 31 + t;\n\
             \x20       }}\n\
             \x20   }}\n\
             \x20   return s + t;\n\
             }}\n\n",
            i % 7 + 3,
            i % 5 + 1,
            i % 11 + 2,
            i % 13 + 5
        );
    }
    text.push_str("int main(void) {\n    int a[64] = {1, 2, 3}, s = 0;\n");
    for i in 0..functions {
        let _ = writeln!(text, "    s += f{i}(a, 64, s);");
    }
    text.push_str("    return s & 1;\n}\n");
    text
}
