//! Whether the system calls of a move would end the process: a seccomp filter may answer
//! a call by a signal, and cannot be asked beforehand. So a child makes the calls first,
//! in a way in which they have no effect. Only under a filter.

use super::sys;

/// Whether a child that made the calls of a move was ended by a signal. False when there
/// is no filter, and when no child could be made.
///
/// The child is no thread of the program and shares no memory with it; no signal tells of
/// its end.
#[must_use]
pub fn calls_are_deadly() -> bool {
    if !sys::is_filtered() {
        return false;
    }
    match sys::fork_silently() {
        // In the child.
        Ok(0) => {
            // Its end is no reason for a core file.
            sys::no_core_file();
            sys::make_calls_without_effect();
            sys::exit_group(0);
        }
        Ok(child) => sys::wait_for(child).is_ok_and(|ended| ended != 0),
        Err(_) => false,
    }
}
