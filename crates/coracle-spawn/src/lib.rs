//! Child processes of the guest agent: programs are started, and exit statuses collected, also those of orphans that PID 1
//! adopts. Also the user namespaces of those that have ids of their own.

mod child;
mod program;
mod reap;
mod service_program;
mod stdio;
mod thread;
mod user_namespace;

pub use program::{Memory, Program, no_input, pipe};
pub use reap::{Exit, Reaper, Scope, Spawned};
pub use service_program::run_to_end;
pub use stdio::{Streams, TERMINALS};
pub use thread::Thread;
pub use user_namespace::{MakesFiles, UserNamespace};
