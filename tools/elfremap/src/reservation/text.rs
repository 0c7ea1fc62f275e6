//! Texts for others: files that repeat a reservation at boot, and what containers and
//! services have to be told.

use std::fmt::Write;
use std::path::Path;

use elfremap::hugepage::{PageSize, pool};

use super::Place;

/// What is to be set at every boot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lasting {
    /// Page size.
    pub size: PageSize,
    /// Whether it is the default size, the only one that sysctl(8) can set.
    pub is_default: bool,
    /// Persistent pages of each changed place.
    pub counts: Vec<(Place, u64)>,
    /// Persistent pages of the machine, for sysctl(8).
    pub machine: u64,
    /// Surplus pages allowed.
    pub overcommit: Option<u64>,
}

/// A file for `/etc/sysctl.d` (sysctl.d(5)). It can set neither a node's share nor another
/// size than the default one.
#[must_use]
pub fn sysctl(lasting: &Lasting) -> String {
    let mut text = String::from("# /etc/sysctl.d/60-elfremap.conf, see sysctl.d(5)\n");
    if lasting.counts.len() > 1 {
        text += "# The kernel spreads the pages evenly over the nodes.\n";
    }
    if !lasting.counts.is_empty() {
        let _ = writeln!(text, "vm.nr_hugepages = {}", lasting.machine);
    }
    if let Some(pages) = lasting.overcommit {
        let _ = writeln!(text, "vm.nr_overcommit_hugepages = {pages}");
    }
    text
}

/// A file for `/etc/tmpfiles.d` (tmpfiles.d(5)): any size, each node by itself.
#[must_use]
pub fn tmpfiles(lasting: &Lasting) -> String {
    let mut text = String::from("# /etc/tmpfiles.d/elfremap.conf, see tmpfiles.d(5)\n");
    for &(place, pages) in &lasting.counts {
        let path = place.path(lasting.size, "nr_hugepages");
        let _ = writeln!(text, "w {path} - - - - {pages}");
    }
    if let Some(pages) = lasting.overcommit {
        let path = pool::global_path(lasting.size, "nr_overcommit_hugepages");
        let _ = writeln!(text, "w {path} - - - - {pages}");
    }
    text
}

/// A systemd unit that reserves with the command at `elfremap`, early in the boot, and
/// fails visibly when the kernel gives fewer pages.
#[must_use]
pub fn unit(lasting: &Lasting, elfremap: &Path) -> String {
    let size = lasting.size;
    let elfremap = systemd_word(&elfremap.to_string_lossy());
    let mut text = format!(
        "# /etc/systemd/system/elfremap-reserve.service\n\
         # systemctl enable elfremap-reserve.service\n\
         [Unit]\n\
         Description=Reserve huge pages\n\
         DefaultDependencies=no\n\
         RequiresMountsFor={elfremap}\n\
         After=local-fs.target\n\
         Before=sysinit.target\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n"
    );
    for &(place, pages) in &lasting.counts {
        let node = match place {
            Place::Machine => String::new(),
            Place::Node(node) => format!(" --node {node}"),
        };
        let _ = writeln!(
            text,
            "ExecStart={elfremap} reserve --size {size}{node} --at-least {pages} --hard"
        );
    }
    if let Some(pages) = lasting.overcommit {
        let _ = writeln!(text, "ExecStart={elfremap} reserve --size {size} --overcommit {pages}");
    }
    text + "\n[Install]\nWantedBy=sysinit.target\n"
}

/// What a program needs that is to run in containers or as a service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Demand<'a> {
    /// Page size.
    pub size: PageSize,
    /// Pages each instance takes.
    pub pages: u64,
    /// How many instances there are.
    pub instances: u64,
    /// The program, when it is known.
    pub program: Option<&'a Path>,
    /// The preload library, where it is installed.
    pub library: &'a Path,
    /// This command, where it is installed.
    pub elfremap: &'a Path,
}

impl Demand<'_> {
    fn name(&self) -> String {
        let name = self.program.and_then(Path::file_name);
        name.map_or(String::from("PROGRAM"), |name| name.to_string_lossy().into_owned())
    }

    fn all(&self) -> u64 {
        self.pages.saturating_mul(self.instances)
    }

    fn total_line(&self) -> String {
        let Self { size, pages, instances, .. } = self;
        let all = self.all();
        format!("# {pages} huge pages of {size} for each of {instances} instances: {all} in all.\n")
    }
}

/// The part of a pod's description that asks for the pages
/// (<https://kubernetes.io/docs/tasks/manage-hugepages/scheduling-hugepages/>).
#[must_use]
pub fn kubernetes(demand: &Demand<'_>) -> String {
    let size = demand.size;
    let (number, prefix) = size.in_unit();
    let resource = format!("hugepages-{number}{prefix}i");
    // The amount in the page's own unit: always a whole number.
    let amount = format!("{}{prefix}i", u128::from(demand.pages) * u128::from(number));
    let library = yaml_word(&demand.library.to_string_lossy());
    let name = demand.name().to_lowercase();
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let name = name.trim_matches('-');
    let name = if name.is_empty() { "program" } else { name };
    format!(
        "{total}\
         # On each machine, for every instance that it is to run, as root:\n\
         #   elfremap reserve --size {size} --pages {pages}\n\
         # and restart its kubelet, which counts the pages only when it starts.\n\
         # A pod without this request may use no page of the pool at all.\n\
         spec:\n\
         \x20 containers:\n\
         \x20 - name: {name}\n\
         \x20   env:\n\
         \x20   - name: LD_PRELOAD\n\
         \x20     value: {library}\n\
         \x20   resources:\n\
         \x20     requests:\n\
         \x20       {resource}: {amount}\n\
         \x20       memory: 1Gi  # yours; Kubernetes demands one with huge pages\n\
         \x20     limits:\n\
         \x20       {resource}: {amount}  # has to equal the request\n\
         \x20       memory: 1Gi\n",
        total = demand.total_line(),
        pages = demand.pages,
    )
}

/// The commands for docker(1). Docker knows no limit of huge pages: its containers share the
/// machine's pool.
#[must_use]
pub fn docker(demand: &Demand<'_>) -> String {
    let mount = shell_word(&format!("{0}:{0}:ro", demand.library.to_string_lossy()));
    let preload = shell_word(&format!("LD_PRELOAD={}", demand.library.to_string_lossy()));
    format!(
        "{total}\
         # On the host, as root (docker sets no limit; containers share the host's pool):\n\
         elfremap reserve --size {size} --pages {all}\n\
         # Then each container, with IMAGE and its arguments as ever:\n\
         docker run -v {mount} \\\n    -e {preload} IMAGE\n",
        total = demand.total_line(),
        size = demand.size,
        all = demand.all(),
    )
}

/// A drop-in for a systemd service (systemd.exec(5)).
#[must_use]
pub fn service(demand: &Demand<'_>) -> String {
    let name = demand.name();
    let library = systemd_value(&format!("LD_PRELOAD={}", demand.library.to_string_lossy()));
    let elfremap = systemd_word(&demand.elfremap.to_string_lossy());
    let size = demand.size;
    let reserve = match demand.program {
        Some(program) => {
            let program = systemd_word(&program.to_string_lossy());
            format!("--for {program} --instances {}", demand.instances)
        }
        None => format!("--available {}", demand.all()),
    };
    format!(
        "{total}\
         # /etc/systemd/system/{name}.service.d/elfremap.conf\n\
         # then: systemctl daemon-reload\n\
         [Service]\n\
         # +: as root, whatever User= says. -: start the service without huge pages too.\n\
         ExecStartPre=-+{elfremap} reserve \\\n    --size {size} {reserve}\n\
         Environment={library}\n\
         # If the service sets MemoryDenyWriteExecute=yes, its text stays on small pages.\n",
        total = demand.total_line(),
    )
}

/// A word for sh(1), in quotes where it needs them.
#[must_use]
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        String::from(word)
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A word of a systemd command line: quoted where needed, `%` and `$` doubled.
fn systemd_word(word: &str) -> String {
    systemd_value(word).replace('$', "$$")
}

/// A word of a systemd assignment, in which only `%` stands for something else.
fn systemd_value(word: &str) -> String {
    let mut quoted = String::new();
    for c in word.chars() {
        match c {
            '%' => quoted += "%%",
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted += "\\n",
            _ => quoted.push(c),
        }
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%$".contains(c);
    if quoted.chars().all(plain) { quoted } else { format!("\"{quoted}\"") }
}

/// A YAML scalar: JSON's quoting is YAML's too.
fn yaml_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if word.chars().all(plain) {
        String::from(word)
    } else {
        serde_json::Value::from(word).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(shell_word("/a/b-1=c"), "/a/b-1=c");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word(""), "''");
        assert_eq!(systemd_word("/a b/$x/50%"), "\"/a b/$$x/50%%\"");
        assert_eq!(systemd_value("A=/a\"$x"), "\"A=/a\\\"$x\"");
        assert_eq!(yaml_word("/usr/lib/a.so"), "/usr/lib/a.so");
        assert_eq!(yaml_word("a: \"b\""), r#""a: \"b\"""#);
    }
}
