//! Which place gets how many pages. Nothing is read or written here.

use std::str::FromStr;

use elfremap::hugepage::NodeSet;

use super::Place;
use super::survey::{Spot, Survey};

/// Where the pages are to be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Nodes {
    /// Evenly on the nodes this process may use; what one of them cannot give, the others do.
    #[default]
    Auto,
    /// Evenly on all nodes with memory.
    All,
    /// Evenly on these.
    Only(NodeSet),
}

impl FromStr for Nodes {
    type Err = BadNodes;

    fn from_str(text: &str) -> Result<Self, BadNodes> {
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            _ => text.parse().map(Self::Only).map_err(|_| BadNodes),
        }
    }
}

/// A text that does not choose nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("write auto, all, or a list of nodes such as 0 or 0-3,5")]
pub struct BadNodes;

/// What is wanted. Numbers are pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// So many more than there are.
    Add(u64),
    /// At least so many in the pool, those in use among them.
    AtLeast(u64),
    /// At least so many free and promised to nobody.
    Available(u64),
    /// Enough free pages for instances of a program, each of which lies on one node as a
    /// whole as far as possible: what runs bound to a node can use no other's pages.
    Instances {
        /// How many.
        count: u64,
        /// Pages of each.
        pages: u64,
    },
}

/// A change of one place's persistent pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Where.
    pub place: Place,
    /// The count of persistent pages that the change starts from. When pages are added
    /// this is the place's total: the kernel makes surplus pages persistent first.
    pub from: u64,
    /// The count to write.
    pub to: u64,
}

impl Step {
    /// Pages to add.
    #[must_use]
    pub const fn add(&self) -> u64 {
        self.to.saturating_sub(self.from)
    }

    /// Pages to give back.
    #[must_use]
    pub const fn give(&self) -> u64 {
        self.from.saturating_sub(self.to)
    }
}

/// What to do for a [`Want`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The chosen places, and the change in each, which may be none.
    pub steps: Vec<Step>,
    /// Pages asked for beyond what is there; the steps may add up to less.
    pub asked: u64,
    /// Pages not even tried, because the memory kept free would be touched.
    pub held_back: u64,
    /// Whether pages that one place does not give may come from another.
    pub may_shift: bool,
    /// With [`Want::Instances`]: how many each place will have room for, in the order of
    /// the steps.
    pub instances: Vec<u64>,
}

/// Why no plan can be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlanError {
    /// There are no such nodes.
    #[error("there is no node {missing}: this machine has node {online}")]
    NoSuchNode {
        /// Those that are missing.
        missing: NodeSet,
        /// Those there are.
        online: NodeSet,
    },
    /// The nodes have no memory.
    #[error("node {bare} has no memory of its own, so no huge pages")]
    NoMemory {
        /// Those without memory.
        bare: NodeSet,
    },
    /// The process is bound to nodes without memory.
    #[error("this process may use only memory of node {allowed}, which holds no huge pages")]
    NotAllowed {
        /// The nodes of the cpuset.
        allowed: NodeSet,
    },
}

/// The places that `nodes` means on this machine.
///
/// # Errors
/// A node is not there or has no memory.
pub fn chosen(survey: &Survey, nodes: &Nodes) -> Result<Vec<Spot>, PlanError> {
    let within = |set: &NodeSet| -> Vec<Spot> {
        let inside = |spot: &&Spot| match spot.place {
            Place::Machine => set.contains(0),
            Place::Node(node) => set.contains(node),
        };
        survey.spots.iter().filter(inside).copied().collect()
    };
    match nodes {
        Nodes::All => Ok(survey.spots.clone()),
        Nodes::Auto => match &survey.allowed {
            None => Ok(survey.spots.clone()),
            Some(allowed) => {
                let spots = within(allowed);
                let allowed = allowed.clone();
                if spots.is_empty() { Err(PlanError::NotAllowed { allowed }) } else { Ok(spots) }
            }
        },
        Nodes::Only(set) => {
            let online = match survey.spots[..] {
                // Without NUMA support all memory counts as node 0.
                [Spot { place: Place::Machine, .. }] => [0].into_iter().collect(),
                _ => survey.online.clone(),
            };
            let without = |others: &NodeSet| -> NodeSet {
                set.iter().filter(|&node| !others.contains(node)).collect()
            };
            let missing = without(&online);
            if !missing.is_empty() {
                return Err(PlanError::NoSuchNode { missing, online });
            }
            let spots = within(set);
            let has_pool = spots.iter().map(|spot| match spot.place {
                Place::Machine => 0,
                Place::Node(node) => node,
            });
            let bare = without(&has_pool.collect());
            if bare.is_empty() { Ok(spots) } else { Err(PlanError::NoMemory { bare }) }
        }
    }
}

/// Spreads what is wanted over the chosen places.
#[must_use]
pub fn grow(survey: &Survey, spots: &[Spot], nodes: &Nodes, want: Want) -> Plan {
    let may_shift = *nodes == Nodes::Auto;
    if let Want::Instances { count, pages } = want {
        return place(survey, spots, count, pages, may_shift);
    }
    let free = spots.iter().fold(0u64, |sum, spot| sum.saturating_add(spot.free));
    let persistent = spots.iter().fold(0u64, |sum, spot| sum.saturating_add(spot.persistent()));
    let (asked, on_top_of_surplus) = match want {
        Want::Add(pages) => (pages, true),
        Want::AtLeast(pages) => (pages.saturating_sub(persistent), false),
        Want::Available(pages) | Want::Instances { pages, .. } => {
            (pages.saturating_sub(free.min(survey.pool.available())), true)
        }
    };
    let tried = asked.min(survey.room.unwrap_or(u64::MAX));
    let room: Vec<_> = spots.iter().map(|spot| spot.room.unwrap_or(u64::MAX)).collect();
    let shares = distribute(tried, &room, may_shift);
    let step = |(spot, add): (&Spot, u64)| {
        let from = if on_top_of_surplus && add > 0 { spot.total } else { spot.persistent() };
        Step { place: spot.place, from, to: from.saturating_add(add) }
    };
    let steps: Vec<_> = spots.iter().zip(shares).map(step).collect();
    let added = steps.iter().map(Step::add).sum();
    let held_back = asked.saturating_sub(added);
    Plan { steps, asked, held_back, may_shift, instances: Vec::new() }
}

/// Places whole instances; pages for those that fit nowhere as a whole are taken where there
/// is room, since an instance makes use of what it finds.
fn place(survey: &Survey, spots: &[Spot], count: u64, pages: u64, may_shift: bool) -> Plan {
    // What is promised is promised by the machine, and by no node: each bears its part.
    let free: Vec<u64> = survey.spots.iter().map(|spot| spot.free).collect();
    let all_free = free.iter().fold(0u64, |sum, &free| sum.saturating_add(free));
    let promised = distribute(all_free.saturating_sub(survey.pool.available()), &free, true);
    let usable: Vec<u64> = spots
        .iter()
        .map(|spot| {
            let mut all = survey.spots.iter().zip(&promised);
            let promised = all.find(|(other, _)| other.place == spot.place).map_or(0, |(_, p)| *p);
            spot.free.saturating_sub(promised)
        })
        .collect();
    let room: Vec<u64> = spots.iter().map(|spot| spot.room.unwrap_or(u64::MAX)).collect();
    let fit = |(&usable, &room): (&u64, &u64)| usable.saturating_add(room) / pages.max(1);
    let fit: Vec<u64> = usable.iter().zip(&room).map(fit).collect();
    let instances = distribute(count, &fit, may_shift);
    let needed = |i: usize| instances[i].saturating_mul(pages);
    let mut add: Vec<u64> = (0..spots.len()).map(|i| needed(i).saturating_sub(usable[i])).collect();
    let spare: u64 = (0..spots.len()).map(|i| usable[i].saturating_sub(needed(i))).sum();
    let homeless = count.saturating_sub(instances.iter().sum()).saturating_mul(pages);
    let homeless = homeless.saturating_sub(spare);
    let asked = add.iter().fold(homeless, |sum, &pages| sum.saturating_add(pages));
    let left: Vec<u64> = room.iter().zip(&add).map(|(room, add)| room - add.min(room)).collect();
    let more = distribute(homeless, &left, true);
    add.iter_mut().zip(more).for_each(|(add, more)| *add = add.saturating_add(more));
    // All nodes together have no more than the machine.
    let mut machine = survey.room.unwrap_or(u64::MAX);
    for add in &mut add {
        *add = (*add).min(machine);
        machine -= *add;
    }
    let step = |(spot, add): (&Spot, u64)| {
        let from = if add > 0 { spot.total } else { spot.persistent() };
        Step { place: spot.place, from, to: from.saturating_add(add) }
    };
    let steps: Vec<Step> = spots.iter().zip(add).map(step).collect();
    let added = steps.iter().map(Step::add).sum();
    Plan { steps, asked, held_back: asked.saturating_sub(added), may_shift, instances }
}

/// Pages that each place can give back: free there, promised to nobody, and not in the
/// stead of a surplus page, which goes back by itself. At most `limit` in all.
#[must_use]
pub fn shrink(survey: &Survey, spots: &[Spot], limit: u64) -> Vec<Step> {
    let mut left = limit.min(survey.pool.available().saturating_sub(survey.pool.surplus));
    let step = |spot: &Spot| {
        let give = spot.free.saturating_sub(spot.surplus).min(spot.persistent()).min(left);
        left -= give;
        Step { place: spot.place, from: spot.persistent(), to: spot.persistent() - give }
    };
    spots.iter().map(step).collect()
}

/// Splits `pages` evenly over places with so much room each; what does not fit into one
/// goes to the others when it `may_shift`, else it is left out. The result adds up to
/// at most `pages`, and no share exceeds its room.
#[must_use]
pub fn distribute(pages: u64, room: &[u64], may_shift: bool) -> Vec<u64> {
    let mut shares = vec![0u64; room.len()];
    let mut left = pages;
    loop {
        let open: Vec<_> = (0..room.len()).filter(|&i| shares[i] < room[i]).collect();
        let Some(each) = left.checked_div(open.len() as u64) else { break };
        let odd = left % open.len() as u64;
        for (position, &i) in open.iter().enumerate() {
            let wanted = each + u64::from((position as u64) < odd);
            let given = wanted.min(room[i] - shares[i]);
            shares[i] += given;
            left -= given;
        }
        if left == 0 || !may_shift {
            break;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn even_shares_and_what_does_not_fit() {
        assert_eq!(distribute(7, &[100, 100, 100], false), [3, 2, 2]);
        assert_eq!(distribute(9, &[1, 100, 100], false), [1, 3, 3]);
        assert_eq!(distribute(9, &[1, 100, 100], true), [1, 4, 4]);
        assert_eq!(distribute(9, &[1, 2, 3], true), [1, 2, 3]);
        assert_eq!(distribute(9, &[0, 0], true), [0, 0]);
        assert_eq!(distribute(9, &[], true), [0; 0]);
        assert_eq!(distribute(u64::MAX, &[u64::MAX], true), [u64::MAX]);
    }

    #[test]
    fn node_choices() {
        assert_eq!("auto".parse(), Ok(Nodes::Auto));
        assert_eq!("all".parse(), Ok(Nodes::All));
        assert_eq!("0,2".parse(), Ok(Nodes::Only([0, 2].into_iter().collect())));
        assert_eq!("some".parse::<Nodes>(), Err(BadNodes));
        assert_eq!("".parse::<Nodes>(), Err(BadNodes));
    }

    proptest! {
        #[test]
        fn shares_fit_and_nothing_is_lost(
            pages in 0u64..200, room in proptest::collection::vec(0u64..60, 0..9), may_shift: bool
        ) {
            let shares = distribute(pages, &room, may_shift);
            let sum: u64 = shares.iter().sum();
            prop_assert!(shares.iter().zip(&room).all(|(share, room)| share <= room));
            prop_assert!(sum <= pages);
            if may_shift {
                prop_assert_eq!(sum, pages.min(room.iter().sum()));
            }
            if room.iter().all(|&room| room >= pages) && !room.is_empty() {
                prop_assert_eq!(sum, pages);
                prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            }
        }
    }
}
