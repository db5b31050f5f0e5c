//! The MikromVM controller against a real API server and a fake agent that can fail in every way.

mod contract;
mod crash;
mod fake_agent;
mod fleet;
mod healing;
mod schema;
mod world;
