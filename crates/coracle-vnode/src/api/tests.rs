//! The API over its network, with VMMs in memory and a real API server for reviews.

mod clients;
mod kubectl;
mod pods;
mod rights;
mod streams;
mod world;
