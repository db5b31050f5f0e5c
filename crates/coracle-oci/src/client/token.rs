//! Challenges of registries and the exchange of credentials for tokens (distribution's "Token Authentication" and
//! "OAuth 2.0 Authentication" specifications).

use reqwest::{Method, StatusCode, Url, header::AUTHORIZATION};
use serde::Deserialize;

use super::{
    policy::Operation,
    session::{Session, sensitive},
};
use crate::OciError;
use crate::auth::Login;

/// Longest response of a token server, bytes.
const ANSWER_MAX: u64 = 1 << 20;
/// Client name sent to token servers.
const CLIENT: &str = "coracle";

/// Authentication that a registry requires (RFC 9110, section 11.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// Token from the server at `realm`.
    Bearer { realm: String, service: Option<String> },
    /// User and password with each request.
    Basic,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
}

impl Challenge {
    /// Selects the challenge to answer, preferring a bearer token. Pure.
    pub(super) fn parse<'a>(headers: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let all: Vec<_> = headers.into_iter().flat_map(challenges).collect();
        let bearer = all.iter().find_map(|(scheme, parameters)| {
            let value = |name: &str| parameters.iter().find(|(key, _)| key == name).map(|(_, v)| v.clone());
            let realm = value("realm").filter(|_| scheme == "bearer")?;
            Some(Self::Bearer { realm, service: value("service") })
        });
        bearer.or_else(|| all.iter().any(|(scheme, _)| scheme == "basic").then_some(Self::Basic))
    }
}

/// Schemes with their parameters. Names are in lower case.
fn challenges(header: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut all: Vec<(String, Vec<(String, String)>)> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find(|c: char| c == '=' || c == ',' || c.is_whitespace()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if word.is_empty() && after.is_empty() {
            return all;
        }
        let word = word.to_ascii_lowercase();
        match (after.trim_start().strip_prefix('='), all.last_mut()) {
            (Some(value), Some((_, parameters))) => {
                let (value, behind) = value_of(value.trim_start());
                parameters.push((word, value));
                rest = behind;
            }
            (Some(value), None) => rest = value,
            (None, _) => {
                all.push((word, Vec::new()));
                rest = after;
            }
        }
    }
}

/// Token or quoted string at the start of `text`, and the remaining text.
fn value_of(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ', '\t']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let (mut value, mut escaped) = (String::new(), false);
    for (at, c) in quoted.char_indices() {
        match c {
            _ if escaped => {
                value.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return (value, &quoted[at + 1..]),
            c => value.push(c),
        }
    }
    (value, "")
}

impl Session {
    /// Gets a token from the token server of the registry.
    pub(super) async fn exchange(&self, realm: &str, service: Option<&str>) -> Result<String, OciError> {
        let realm = self.check_realm(realm)?;
        let scope = match self.operation {
            Operation::Pull => format!("repository:{}:pull", self.reference.repository()),
            Operation::Push => format!("repository:{}:pull,push", self.reference.repository()),
        };
        let mut fields = vec![("scope", scope.as_str())];
        fields.extend(service.map(|service| ("service", service)));
        let request = match &self.login {
            Login::Identity(token) => {
                fields.extend([("grant_type", "refresh_token"), ("client_id", CLIENT)]);
                fields.push(("refresh_token", token.expose()));
                self.transport.request(Method::POST, realm).form(&fields)
            }
            Login::Basic { user, password } => {
                let request = self.transport.request(Method::GET, realm).query(&fields);
                request.header(AUTHORIZATION, self.basic(user, password)?)
            }
            Login::Anonymous | Login::Bearer(_) => self.transport.request(Method::GET, realm).query(&fields),
        };
        let answer = self.run(request.timeout(self.timeouts.request), "log in").await?;
        match answer.status() {
            status if status.is_success() => {}
            // Does not quote the body: any server may have written it.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::BAD_REQUEST => {
                return Err(self.unauthorized(None));
            }
            status => return Err(self.status("log in", status.as_u16())),
        }
        let bytes = self.body(answer, ANSWER_MAX, "answer of the token server").await?;
        let token = serde_json::from_slice::<Answer>(&bytes).ok();
        let token = token.map(|a| if a.token.is_empty() { a.access_token } else { a.token });
        let token = token.filter(|token| !token.is_empty());
        token.ok_or_else(|| self.unauthorized(Some("the token server returned no token".into())))
    }

    /// URL of the token server, if this login may be sent to it.
    fn check_realm(&self, realm: &str) -> Result<Url, OciError> {
        let refused = |why: &str| self.unauthorized(Some(why.into()));
        let url = Url::parse(realm).map_err(|_| refused("invalid address of the token server"))?;
        let has_secret = matches!(self.login, Login::Basic { .. } | Login::Identity(_));
        match url.scheme() {
            "https" => Ok(url),
            "http" if self.endpoint.plain_http => Ok(url),
            "http" if !has_secret && !self.transport.is_guarded() => Ok(url),
            "http" => Err(refused("the token server uses plain http, the registry does not")),
            _ => Err(refused("invalid address of the token server")),
        }
    }

    pub(super) fn basic(
        &self,
        user: &str,
        password: &crate::Secret,
    ) -> Result<reqwest::header::HeaderValue, OciError> {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let text = format!("Basic {}", STANDARD.encode(format!("{user}:{}", password.expose())));
        sensitive(&text).map_err(|e| self.unauthorized(Some(e.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenge_table() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) })
        };
        for (why, headers, want) in [
            (
                "Docker Hub",
                vec![
                    r#"Bearer realm="https://a.io/token",service="registry.docker.io",scope="repository:x:pull,push""#,
                ],
                bearer("https://a.io/token", Some("registry.docker.io")),
            ),
            (
                "no service",
                vec![r#"bearer  realm = "https://a.io/token""#],
                bearer("https://a.io/token", None),
            ),
            (
                "not quoted",
                vec!["Bearer realm=https://a.io/token, service=s"],
                bearer("https://a.io/token", Some("s")),
            ),
            (
                "escapes",
                vec![r#"Bearer realm="https://a.io/\"x\"",service="a,b""#],
                bearer("https://a.io/\"x\"", Some("a,b")),
            ),
            ("basic", vec![r#"Basic realm="test""#], Some(Challenge::Basic)),
            (
                "both in one header",
                vec![r#"Basic realm="x", Bearer realm="https://a.io/t""#],
                bearer("https://a.io/t", None),
            ),
            (
                "both in two headers",
                vec![r#"Basic realm="x""#, r#"Bearer realm="https://a.io/t""#],
                bearer("https://a.io/t", None),
            ),
            ("bearer without realm", vec!["Bearer", "Basic"], Some(Challenge::Basic)),
            ("negotiate", vec!["Negotiate"], None),
            ("nothing", vec![""], None),
            ("unfinished", vec![r#"Bearer realm="https://a.io/t"#], bearer("https://a.io/t", None)),
            ("only a parameter", vec!["realm=x"], None),
        ] {
            assert_eq!(Challenge::parse(headers), want, "{why}");
        }
    }
}
