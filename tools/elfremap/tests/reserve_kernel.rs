//! Growing and shrinking against a model of the kernel's pool code (`mm/hugetlb.c`,
//! `set_max_huge_pages`): surplus pages become persistent first, what cannot be had is left
//! out without an error, pages in use or promised are never taken away.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};

use elfremap::hugepage::{Files, NodeSet, PageSize};
use elfremap_tools::reservation::apply::{self, Effort, Outcome};
use elfremap_tools::reservation::plan::{self, Nodes, PlanError, Want};
use elfremap_tools::reservation::survey::{self, KeepFree, Survey};
use elfremap_tools::system::Knobs;
use proptest::prelude::*;

const SIZE: PageSize = PageSize::SIZE_2M;

/// One node. Counts are pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Node {
    total: u64,
    free: u64,
    surplus: u64,
    /// Memory that can become huge pages at once.
    whole: u64,
    /// Memory that can after compaction.
    scattered: u64,
}

impl Node {
    fn used(&self) -> u64 {
        self.total - self.free
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct State {
    nodes: BTreeMap<u32, Node>,
    reserved: u64,
    overcommit: u64,
}

#[derive(Default)]
struct Kernel {
    state: RefCell<State>,
    /// Files written, in order.
    log: RefCell<Vec<String>>,
    /// The write (counted from 0) that is refused.
    refuse: Option<usize>,
    /// Pages a node gives at most in one write.
    at_once: Option<u64>,
}

impl Kernel {
    fn new(nodes: impl IntoIterator<Item = (u32, Node)>) -> Self {
        let nodes = nodes.into_iter().collect();
        Self { state: RefCell::new(State { nodes, ..State::default() }), ..Self::default() }
    }

    fn state(&self) -> State {
        self.state.borrow().clone()
    }

    fn totals(&self) -> Vec<u64> {
        self.state.borrow().nodes.values().map(|node| node.total).collect()
    }

    fn writes_to(&self, end: &str) -> usize {
        self.log.borrow().iter().filter(|path| path.ends_with(end)).count()
    }

    fn survey(&self) -> Survey {
        survey::read(self, SIZE, KeepFree::Bytes(1)).unwrap().unwrap()
    }

    fn grow(&self, nodes: &str, want: Want, effort: Effort) -> Outcome {
        let nodes: Nodes = nodes.parse().unwrap();
        let survey = self.survey().without_limits();
        let spots = plan::chosen(&survey, &nodes).unwrap();
        let plan = plan::grow(&survey, &spots, &nodes, want);
        apply::grow(self, &survey, &plan, effort, || false)
    }

    fn shrink(&self, nodes: &str, limit: u64) {
        let survey = self.survey();
        let spots = plan::chosen(&survey, &nodes.parse().unwrap()).unwrap();
        apply::shrink(self, SIZE, &plan::shrink(&survey, &spots, limit)).unwrap();
    }

    fn set_node(&self, number: u32, count: u64) {
        let mut state = self.state.borrow_mut();
        let reserved = state.reserved;
        let free_elsewhere: u64 =
            state.nodes.iter().filter(|(n, _)| **n != number).map(|(_, node)| node.free).sum();
        let node = state.nodes.get_mut(&number).unwrap();
        let persistent = |node: &Node| node.total - node.surplus;
        while node.surplus > 0 && count > persistent(node) {
            node.surplus -= 1;
        }
        let mut given = 0;
        while count > persistent(node) && node.whole > 0 && given < self.at_once.unwrap_or(u64::MAX)
        {
            node.whole -= 1;
            node.total += 1;
            node.free += 1;
            given += 1;
        }
        while count < persistent(node) && node.free > 0 && node.free + free_elsewhere > reserved {
            node.free -= 1;
            node.total -= 1;
            node.whole += 1;
        }
        while count < persistent(node) {
            node.surplus += 1;
        }
    }
}

fn node_of(path: &str) -> Option<(u32, &str)> {
    let rest = path.strip_prefix("/sys/devices/system/node/node")?;
    let (number, file) = rest.split_once('/')?;
    Some((number.parse().ok()?, file))
}

impl Files for Kernel {
    type Error = io::Error;

    fn read(&self, path: &str, out: &mut Vec<u8>) -> io::Result<bool> {
        let state = self.state.borrow();
        let sum = |of: fn(&Node) -> u64| -> u64 { state.nodes.values().map(of).sum() };
        let count = |node: &Node, file: &str| match file {
            "nr_hugepages" => Some(node.total),
            "free_hugepages" => Some(node.free),
            "surplus_hugepages" => Some(node.surplus),
            _ => None,
        };
        let text = if let Some((number, file)) = node_of(path) {
            let Some(node) = state.nodes.get(&number) else { return Ok(false) };
            if file == "meminfo" {
                let free = (node.whole + node.scattered) * SIZE.kilobytes();
                Some(format!(
                    "Node {number} MemTotal: {free} kB\nNode {number} MemFree: {free} kB\n"
                ))
            } else {
                file.strip_prefix("hugepages/hugepages-2048kB/")
                    .and_then(|file| count(node, file))
                    .map(|count| format!("{count}\n"))
            }
        } else if path == "/proc/meminfo" {
            let free = sum(|node| node.whole + node.scattered) * SIZE.kilobytes();
            Some(format!("MemTotal: {free} kB\nMemAvailable: {free} kB\nHugepagesize: 2048 kB\n"))
        } else {
            let all = Node {
                total: sum(|node| node.total),
                free: sum(|node| node.free),
                surplus: sum(|node| node.surplus),
                ..Node::default()
            };
            path.strip_prefix("/sys/kernel/mm/hugepages/hugepages-2048kB/")
                .and_then(|file| match file {
                    "resv_hugepages" => Some(state.reserved),
                    "nr_overcommit_hugepages" => Some(state.overcommit),
                    _ => count(&all, file),
                })
                .map(|count| format!("{count}\n"))
        };
        out.extend(text.iter().flat_map(|text| text.bytes()));
        Ok(text.is_some())
    }

    fn list(&self, path: &str, each: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        match path {
            "/sys/kernel/mm/hugepages" => each(b"hugepages-2048kB"),
            "/sys/devices/system/node" => {
                self.state.borrow().nodes.keys().for_each(|n| each(format!("node{n}").as_bytes()));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl Knobs for Kernel {
    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let turn = self.log.borrow().len();
        self.log.borrow_mut().push(path.to_owned());
        if self.refuse == Some(turn) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let value: u64 = text.parse().unwrap();
        match node_of(path) {
            Some((number, "hugepages/hugepages-2048kB/nr_hugepages")) => {
                self.set_node(number, value);
            }
            Some((number, "compact")) => {
                let mut state = self.state.borrow_mut();
                let node = state.nodes.get_mut(&number).unwrap();
                node.whole += std::mem::take(&mut node.scattered);
            }
            _ if path.ends_with("/nr_overcommit_hugepages") => {
                self.state.borrow_mut().overcommit = value;
            }
            _ if path == "/proc/sys/vm/drop_caches" => {}
            _ => return Err(ErrorKind::NotFound.into()),
        }
        Ok(())
    }
}

fn with_memory(whole: u64) -> Node {
    Node { whole, ..Node::default() }
}

const HARD: Effort = Effort { hard: true, all_or_nothing: false };
const ALL: Effort = Effort { hard: false, all_or_nothing: true };
const PLAIN: Effort = Effort { hard: false, all_or_nothing: false };

#[test]
fn one_nodes_pages_do_not_undo_anothers() {
    let kernel = Kernel::new([0, 2, 5].map(|n| (n, with_memory(200))));
    assert_eq!(kernel.grow("0", Want::Add(25), PLAIN).got(), 25);
    assert_eq!(kernel.grow("2", Want::Add(75), PLAIN).got(), 75);
    assert_eq!(kernel.totals(), [25, 75, 0]);
    assert_eq!(kernel.grow("2", Want::Add(10), PLAIN).got(), 10);
    assert_eq!(kernel.grow("2", Want::AtLeast(50), PLAIN).got(), 0);
    assert_eq!(kernel.grow("5", Want::AtLeast(50), PLAIN).got(), 50);
    assert_eq!(kernel.totals(), [25, 85, 50]);
    // Only files of the chosen nodes, one write each time one was needed.
    assert_eq!(kernel.log.borrow().len(), 4);
    assert!(kernel.log.borrow().iter().all(|path| node_of(path).is_some()));
}

#[test]
fn spread_over_eight_nodes() {
    let kernel = Kernel::new((0..8).map(|n| (n * 3, with_memory(100))));
    assert_eq!(kernel.grow("all", Want::Add(82), PLAIN).got(), 82);
    assert_eq!(kernel.totals(), [11, 11, 10, 10, 10, 10, 10, 10]);
}

#[test]
fn fewer_than_asked_is_found_out_and_tried_again_a_few_times() {
    let kernel = Kernel::new([(0, with_memory(60))]);
    let outcome = kernel.grow("0", Want::Add(100), PLAIN);
    assert_eq!((outcome.got(), outcome.undone), (60, false));
    assert_eq!(kernel.log.borrow().len(), 2);

    // A kernel that gives more at the second try.
    let mut kernel = Kernel::new([(0, with_memory(60))]);
    kernel.at_once = Some(30);
    assert_eq!(kernel.grow("0", Want::Add(60), PLAIN).got(), 60);
    assert_eq!(kernel.log.borrow().len(), 2);
}

#[test]
fn compaction_only_when_asked_and_only_on_that_node() {
    let node = Node { whole: 10, scattered: 50, ..Node::default() };
    let kernel = Kernel::new([(0, node), (1, node)]);
    assert_eq!(kernel.grow("1", Want::Add(40), PLAIN).got(), 10);
    assert_eq!(kernel.writes_to("compact"), 0);
    assert_eq!(kernel.grow("1", Want::Add(30), HARD).got(), 30);
    assert_eq!(kernel.writes_to("node1/compact"), 1);
    assert_eq!(kernel.writes_to("drop_caches"), 1);
    assert_eq!(kernel.writes_to("node0/compact"), 0);
    // Hopeless, but not endless.
    assert_eq!(kernel.grow("1", Want::Add(1000), HARD).got(), 20);
    assert!(kernel.log.borrow().len() < 25);
}

#[test]
fn all_or_nothing_gives_back_what_it_took() {
    let kernel = Kernel::new([(0, with_memory(100)), (1, with_memory(10))]);
    let before = kernel.state();
    let outcome = kernel.grow("all", Want::Add(80), ALL);
    assert_eq!((outcome.got(), outcome.gained(), outcome.undone), (0, 50, true));
    assert_eq!(kernel.state(), before);
    assert_eq!(kernel.grow("all", Want::Add(20), ALL).got(), 20);
}

#[test]
fn auto_lets_one_node_help_out_for_another_all_does_not() {
    let nodes = [(0, with_memory(10)), (1, with_memory(100)), (3, with_memory(25))];
    let kernel = Kernel::new(nodes);
    assert_eq!(kernel.grow("auto", Want::Add(90), PLAIN).got(), 90);
    assert_eq!(kernel.totals(), [10, 55, 25]);
    let kernel = Kernel::new(nodes);
    assert_eq!(kernel.grow("all", Want::Add(90), PLAIN).got(), 65);
    assert_eq!(kernel.totals(), [10, 30, 25]);
    let kernel = Kernel::new(nodes);
    assert_eq!(kernel.grow("auto", Want::Add(1000), PLAIN).got(), 135);
}

#[test]
fn surplus_pages_in_use_do_not_count_as_new_ones() {
    let node = Node { total: 10, free: 0, surplus: 4, whole: 50, scattered: 0 };
    let kernel = Kernel::new([(0, node)]);
    assert_eq!(kernel.grow("0", Want::Add(5), PLAIN).got(), 5);
    let after = kernel.state().nodes[&0];
    assert_eq!((after.total, after.free, after.surplus), (15, 5, 0));

    // When it's undone the surplus pages are surplus pages again.
    let kernel = Kernel::new([(0, node)]);
    let before = kernel.state();
    assert!(kernel.grow("0", Want::Add(60), ALL).undone);
    assert_eq!(kernel.state(), before);
}

#[test]
fn promised_pages_are_not_available() {
    let kernel = Kernel::new([(0, Node { total: 10, free: 8, whole: 50, ..Node::default() })]);
    kernel.state.borrow_mut().reserved = 6;
    assert_eq!(kernel.grow("0", Want::Available(5), PLAIN).got(), 3);
    assert_eq!(kernel.grow("0", Want::Available(5), PLAIN).got(), 0);
}

#[test]
fn free_pages_on_another_node_are_not_available() {
    let node = Node { total: 50, free: 50, whole: 50, ..Node::default() };
    let kernel = Kernel::new([(0, with_memory(50)), (1, node)]);
    assert_eq!(kernel.grow("0", Want::Available(5), PLAIN).got(), 5);
    assert_eq!(kernel.totals(), [5, 50]);
}

#[test]
fn release_leaves_what_is_used_or_promised() {
    let kernel = Kernel::new([
        (0, Node { total: 20, free: 15, ..Node::default() }),
        (1, Node { total: 10, free: 10, ..Node::default() }),
    ]);
    kernel.state.borrow_mut().reserved = 8;
    kernel.shrink("1", 4);
    assert_eq!(kernel.totals(), [20, 6]);
    kernel.shrink("all", u64::MAX);
    let state = kernel.state();
    assert_eq!(state.nodes.values().map(|node| node.free).sum::<u64>(), 8);
    assert_eq!(state.nodes.values().map(Node::used).sum::<u64>(), 5);
    assert!(state.nodes.values().all(|node| node.surplus == 0));
}

#[test]
fn a_refused_write_ends_the_work_and_is_reported() {
    let mut kernel = Kernel::new([(0, with_memory(50)), (1, with_memory(50))]);
    kernel.refuse = Some(1);
    let outcome = kernel.grow("all", Want::Add(20), PLAIN);
    assert_eq!(outcome.got(), 10);
    let failure = outcome.failure.unwrap();
    assert!(failure.is_permission() && failure.path.contains("node1"));
    assert_eq!(kernel.totals(), [10, 0]);

    let mut kernel = Kernel::new([(0, with_memory(50)), (1, with_memory(50))]);
    kernel.refuse = Some(1);
    let outcome = kernel.grow("all", Want::Add(20), ALL);
    assert!(outcome.undone && outcome.failure.is_some());
    assert_eq!(kernel.totals(), [0, 0]);
}

#[test]
fn an_interruption_stops_between_nodes() {
    let kernel = Kernel::new([(0, with_memory(50)), (1, with_memory(50))]);
    let survey = kernel.survey();
    let plan = plan::grow(&survey, &survey.spots, &Nodes::All, Want::Add(20));
    let asked = RefCell::new(0);
    let stop = || std::mem::replace(&mut *asked.borrow_mut(), 1) > 0;
    let outcome = apply::grow(&kernel, &survey, &plan, ALL, stop);
    assert!(outcome.undone);
    assert_eq!(kernel.totals(), [0, 0]);
    assert_eq!(kernel.writes_to("node1/hugepages/hugepages-2048kB/nr_hugepages"), 0);
}

#[test]
fn nodes_that_cannot_be_chosen() {
    let survey = Kernel::new([(0, with_memory(9)), (4, with_memory(9))]).survey();
    let missing = plan::chosen(&survey, &"0,2".parse().unwrap()).unwrap_err();
    assert_eq!(missing.to_string(), "there is no node 2: this machine has node 0,4");
    let mut bare = survey.clone();
    bare.online = [0, 2, 4].into_iter().collect();
    let error = plan::chosen(&bare, &"2,4".parse().unwrap()).unwrap_err();
    assert_eq!(error, PlanError::NoMemory { bare: [2].into_iter().collect() });
    let mut bound = survey.clone();
    bound.allowed = Some([4].into_iter().collect());
    assert_eq!(plan::chosen(&bound, &Nodes::Auto).unwrap().len(), 1);
    assert_eq!(plan::chosen(&bound, &Nodes::All).unwrap().len(), 2);
    bound.allowed = Some(NodeSet::default());
    assert!(plan::chosen(&bound, &Nodes::Auto).is_err());
}

#[test]
fn memory_is_kept_free() {
    let kernel = Kernel::new([(0, with_memory(100)), (1, with_memory(300))]);
    let keep = KeepFree::Bytes(80 * SIZE.bytes());
    let survey = survey::read(&kernel, SIZE, keep).unwrap().unwrap();
    let rooms: Vec<_> = survey.spots.iter().map(|spot| spot.room.unwrap()).collect();
    assert_eq!((survey.room, rooms), (Some(320), vec![80, 240]));
    let plan = plan::grow(&survey, &survey.spots, &Nodes::Auto, Want::Add(1000));
    assert_eq!((plan.asked, plan.held_back), (1000, 680));
    let outcome = apply::grow(&kernel, &survey, &plan, PLAIN, || false);
    assert_eq!(outcome.got(), 320);
    assert_eq!(kernel.totals(), [80, 240]);
    let all = survey::read(&kernel, SIZE, KeepFree::Bytes(0)).unwrap().unwrap();
    assert!(all.room.is_none() && all.spots.iter().all(|spot| spot.room.is_none()));
}

fn any_state() -> impl Strategy<Value = State> {
    let node = (0u64..20, 0u64..20, 0u64..5, 0u64..30, 0u64..10).prop_map(
        |(used, free, surplus, whole, scattered)| Node {
            total: used + free,
            free,
            surplus: surplus.min(used),
            whole,
            scattered,
        },
    );
    (proptest::collection::btree_map(0u32..9, node, 1..6), 0u64..30, 0u64..5).prop_map(
        |(nodes, reserved, overcommit)| {
            let free: u64 = nodes.values().map(|node| node.free).sum();
            State { nodes, reserved: reserved.min(free), overcommit }
        },
    )
}

fn any_want() -> impl Strategy<Value = Want> {
    (0u64..80, 0..3).prop_map(|(pages, kind)| match kind {
        0 => Want::Add(pages),
        1 => Want::AtLeast(pages),
        _ => Want::Available(pages),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nobody_loses_a_page(
        state in any_state(), want in any_want(), hard: bool, all_or_nothing: bool,
        at_once in proptest::option::of(1u64..20), choice in 0..3usize, refuse in proptest::option::of(0usize..8)
    ) {
        let first = *state.nodes.keys().next().unwrap();
        let nodes = [String::from("auto"), String::from("all"), first.to_string()][choice].clone();
        let kernel = Kernel { state: RefCell::new(state.clone()), at_once, refuse, ..Kernel::default() };
        let outcome = kernel.grow(&nodes, want, Effort { hard, all_or_nothing });
        let after = kernel.state();
        for (number, node) in &state.nodes {
            let now = after.nodes[number];
            prop_assert_eq!(now.used(), node.used());
            if outcome.failure.is_none() {
                prop_assert!(now.total >= node.total, "node {} shrank", number);
            }
            if choice == 2 && *number != first {
                prop_assert_eq!((now.total, now.surplus), (node.total, node.surplus));
            }
        }
        if outcome.undone && outcome.failure.is_none() {
            for (number, node) in &state.nodes {
                let now = after.nodes[number];
                prop_assert_eq!((now.total, now.free), (node.total, node.free));
                prop_assert!(now.surplus == node.surplus || node.free > 0);
            }
        }
        let files: BTreeSet<_> = kernel.log.borrow().iter().cloned().collect();
        prop_assert!(!files.contains("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"));
        prop_assert!(kernel.log.borrow().len() <= 200);
    }

    #[test]
    fn releasing_takes_free_pages_only(state in any_state(), limit in 0u64..50) {
        let kernel = Kernel { state: RefCell::new(state.clone()), ..Kernel::default() };
        kernel.shrink("all", limit);
        let after = kernel.state();
        let sum = |state: &State, of: fn(&Node) -> u64| state.nodes.values().map(of).sum::<u64>();
        prop_assert!(sum(&after, |n| n.free) >= state.reserved);
        prop_assert!(sum(&state, |n| n.total) - sum(&after, |n| n.total) <= limit);
        for (number, node) in &state.nodes {
            let now = after.nodes[number];
            prop_assert_eq!(now.used(), node.used());
            prop_assert_eq!(now.surplus, node.surplus);
        }
    }
}
