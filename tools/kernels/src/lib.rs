//! What the host's and the guest's program share.

pub mod line;
