//! What `elfremap compare` is made of: running programs and servers under measurement,
//! hardware counters, and the statistics that turn runs into a verdict.

pub mod counters;
pub(crate) mod logs;
pub mod measure;
pub(crate) mod report;
pub mod server;
pub mod stats;
pub mod variant;
