//! Single-use tokens: another call issues the path that a client may use once.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Lifetime of a token.
const LIFETIME: Duration = Duration::from_secs(60);
/// Most tokens that are valid at the same time.
const OUTSTANDING_MAX: usize = 1000;

/// Token: 48 random bits as 8 characters that need no escaping in a path. Secret, therefore not shown by `Debug`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Token(String);

impl Token {
    fn random() -> Self {
        Self(URL_SAFE_NO_PAD.encode(rand::random::<[u8; 6]>()))
    }

    /// Returns the characters of the token.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Error for too many outstanding tokens: `ResourceExhausted`, or 429 with `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot issue token: {outstanding} tokens are outstanding")]
pub struct TooMany {
    outstanding: usize,
}

/// Values that wait for a client with their token.
pub struct Tokens<T> {
    lifetime: Duration,
    outstanding_max: usize,
    waiting: Mutex<Waiting<T>>,
}

struct Waiting<T> {
    values: HashMap<String, T>,
    /// Expiry times, oldest first. Includes tokens that were taken, until they expire.
    ends: VecDeque<(Instant, String)>,
}

impl<T> Waiting<T> {
    fn expire(&mut self, now: Instant) {
        while self.ends.front().is_some_and(|(end, _)| *end <= now) {
            if let Some((_, token)) = self.ends.pop_front() {
                self.values.remove(&token);
            }
        }
    }

    /// Removes taken tokens, so that `ends` stays bounded when tokens are issued and taken quickly.
    fn forget_taken(&mut self) {
        let Self { values, ends } = self;
        ends.retain(|(_, token)| values.contains_key(token));
    }
}

impl<T> Default for Tokens<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Tokens<T> {
    /// Returns a store of tokens that are valid for a minute, at most 1000 at a time.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(LIFETIME, OUTSTANDING_MAX)
    }

    /// Returns a store of tokens that are valid for `lifetime`, at most `outstanding_max` at a time.
    #[must_use]
    pub fn with_limits(lifetime: Duration, outstanding_max: usize) -> Self {
        let waiting = Waiting { values: HashMap::new(), ends: VecDeque::new() };
        Self { lifetime, outstanding_max, waiting: Mutex::new(waiting) }
    }

    /// Stores `value` for the client that presents the token. Time is measured by tokio's clock.
    ///
    /// # Errors
    /// [`TooMany`]; `value` is dropped.
    pub fn issue(&self, value: T) -> Result<Token, TooMany> {
        let now = Instant::now();
        let mut waiting = self.waiting.lock();
        waiting.expire(now);
        if waiting.ends.len() >= 2 * self.outstanding_max {
            waiting.forget_taken();
        }
        let outstanding = waiting.values.len();
        if outstanding >= self.outstanding_max {
            return Err(TooMany { outstanding });
        }
        let mut token = Token::random();
        while waiting.values.contains_key(token.as_str()) {
            token = Token::random();
        }
        waiting.values.insert(token.0.clone(), value);
        waiting.ends.push_back((now + self.lifetime, token.0.clone()));
        Ok(token)
    }

    /// Returns the value of a valid token, once. `None` for a token that is unknown, used or expired: 404.
    pub fn take(&self, token: &str) -> Option<T> {
        let mut waiting = self.waiting.lock();
        waiting.expire(Instant::now());
        waiting.values.remove(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn token_is_valid_once_and_for_a_minute() {
        let tokens = Tokens::new();
        let (first, second) = (tokens.issue(1).unwrap(), tokens.issue(2).unwrap());
        assert!(first.as_str().len() == 8 && first != second, "{first} {second}");
        assert_eq!(tokens.take(first.as_str()), Some(1));
        assert_eq!(tokens.take(first.as_str()), None);
        tokio::time::advance(LIFETIME - Duration::from_millis(1)).await;
        let third = tokens.issue(3).unwrap();
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(tokens.take(second.as_str()), None);
        assert_eq!(tokens.take(third.as_str()), Some(3));
        assert_eq!(tokens.take(""), None);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_bounded_until_one_is_taken_or_expires() {
        let tokens = Tokens::with_limits(LIFETIME, 3);
        let issued: Vec<_> = (0..3).map(|n| tokens.issue(n).unwrap()).collect();
        let error = tokens.issue(3).unwrap_err();
        assert_eq!(error.to_string(), "cannot issue token: 3 tokens are outstanding");
        assert_eq!(tokens.take(issued[1].as_str()), Some(1));
        tokens.issue(4).unwrap();
        assert!(tokens.issue(5).is_err());
        tokio::time::advance(LIFETIME).await;
        tokens.issue(6).unwrap();
        for n in 0..100 {
            let token = tokens.issue(n).unwrap();
            assert_eq!(tokens.take(token.as_str()), Some(n));
        }
        assert!(tokens.waiting.lock().ends.len() <= 6);
    }
}
