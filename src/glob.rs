//! Names of programs as users write them: plain or with `*` and `?`.

/// Whether `name` matches `pattern`. `*` stands for any number of bytes, slashes
/// included, `?` for one byte; there is no way to quote them.
#[must_use]
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to go on when the bytes after the last star did not fit: one byte later.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                retry = Some((p, n));
            }
            Some(&c) if c == b'?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match retry {
                Some((after_star, from)) => {
                    retry = Some((after_star, from + 1));
                    p = after_star;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

/// Whether a program is in a colon-separated list of names or globs. A pattern with a
/// slash is compared with the whole path, another with the last part of it.
#[must_use]
pub fn in_list(list: &[u8], path: &[u8]) -> bool {
    let base = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
    list.split(|&b| b == b':')
        .filter(|pattern| !pattern.is_empty())
        .any(|pattern| matches(pattern, if pattern.contains(&b'/') { path } else { base }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_of_names() {
        assert!(in_list(b"mysqld:mariadbd", b"/usr/sbin/mariadbd"));
        assert!(in_list(b"/usr/*/m?riadbd", b"/usr/sbin/mariadbd"));
        assert!(!in_list(b"sbin", b"/usr/sbin/mariadbd"));
        assert!(!in_list(b"", b"") && !in_list(b"::", b"x"));
        assert!(in_list(b"post*", b"/usr/lib/postgresql/15/bin/postgres"));
    }

    #[test]
    fn stars() {
        assert!(matches(b"*a*b*", b"xxaxxbxx") && !matches(b"*a*b", b"ba"));
        assert!(matches(b"", b"") && matches(b"**", b"") && !matches(b"?", b""));
        // Exponential in a naive matcher.
        assert!(!matches(b"*a*a*a*a*a*a*a*a*a*a*b", &[b'a'; 200]));
    }

    proptest! {
        #[test]
        fn a_name_matches_itself_and_a_star(name in proptest::collection::vec(b'a'..=b'd', 0..20)) {
            prop_assert!(matches(&name, &name) && matches(b"*", &name));
            let mut longer = name.clone();
            longer.push(b'x');
            prop_assert!(!matches(&name, &longer));
        }
    }
}
