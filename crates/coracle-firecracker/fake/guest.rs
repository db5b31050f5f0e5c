//! The guest: it says hello to everyone who connects to its port, for as long as its CPUs run.

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

/// The agent's port.
const PORT: &str = "CONNECT 1024\n";

#[derive(Debug, Default)]
struct State {
    running: bool,
    sessions: u64,
}

/// A machine's guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guest(Arc<(Mutex<State>, Condvar)>);

impl Guest {
    /// One that goes on where another stood.
    pub(crate) fn after(sessions: u64) -> Self {
        let guest = Self::default();
        guest.change(|state| state.sessions = sessions);
        guest
    }

    /// Lets its CPUs run, or holds them.
    pub(crate) fn run(&self, yes: bool) {
        self.change(|state| state.running = yes);
    }

    /// How many have heard its hello.
    pub(crate) fn sessions(&self) -> u64 {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).sessions
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let (state, changed) = &*self.0;
        change(&mut state.lock().unwrap_or_else(PoisonError::into_inner));
        changed.notify_all();
    }

    /// Listens at the vsock's socket. The thread ends with the process.
    pub(crate) fn listen(&self, socket: &str) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let guest = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let guest = guest.clone();
                thread::spawn(move || guest.meet(stream));
            }
        });
        Ok(())
    }

    fn meet(&self, mut stream: UnixStream) -> Option<()> {
        let mut line = String::new();
        while !line.ends_with('\n') && line.len() < 32 {
            let mut byte = [0];
            io::Read::read_exact(&mut stream, &mut byte).ok()?;
            line.push(byte[0].into());
        }
        if line != PORT {
            return None; // nobody listens there: the VMM closes
        }
        let (state, changed) = &*self.0;
        let mut held = state.lock().unwrap_or_else(PoisonError::into_inner);
        while !held.running {
            held = changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.sessions += 1;
        let mut hello = b"OK 1073741824\nCORACLE1".to_vec();
        hello.extend(held.sessions.to_be_bytes());
        drop(held);
        stream.write_all(&hello).ok()?;
        // It keeps the session until the host ends it.
        let _ended = io::copy(&mut stream, &mut io::sink());
        Some(())
    }
}
