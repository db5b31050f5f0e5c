//! `coracle market …`: server and client are the real program; checks every output format and the documented exit codes.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Output};
use std::time::Duration;

use crate::support::{CORACLE, text};
use coracle_testkit::{eventually_blocking, netns};
use serde_json::Value;

const TOKEN: &str = "test-admin";
const LIMIT: Duration = Duration::from_secs(30);

struct Market {
    child: Child,
    url: String,
    ca: String,
    _dir: tempfile::TempDir,
}

impl Drop for Market {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free() -> String {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().to_string()
}

impl Market {
    fn serve() -> Self {
        Self::serve_with(&[], "")
    }

    /// Serves with additional flags; with an authority, clients use TLS.
    fn serve_with(flags: &[&str], ca: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (grpc, http) = (free(), free());
        let store = format!("sqlite:{}", dir.path().join("market.db").display());
        let mut command = Command::new(CORACLE);
        command.args(["market", "serve", "--region=local", "--log=warn", "--store", &store, "--grpc", &grpc]);
        let child = command.args(["--http", &http, "--admin-token", TOKEN]).args(flags).spawn().unwrap();
        let scheme = if ca.is_empty() { "http" } else { "https" };
        let market = Self { child, url: format!("{scheme}://{grpc}"), ca: ca.to_owned(), _dir: dir };
        let ready = || (market.ask(&["price"]).status.code() == Some(0)).then_some(());
        if let Err(error) = eventually_blocking(LIMIT, "the market answers", ready) {
            panic!("{error}: {}", text(&market.ask(&["price"]).stderr));
        }
        market
    }

    fn ask_as(&self, token: &str, args: &[&str]) -> Output {
        let mut command = Command::new(CORACLE);
        command.arg("market").args(args).args(["--url", &self.url, "--token", token]);
        if !self.ca.is_empty() {
            command.args(["--ca", &self.ca]);
        }
        command.env_remove("CORACLE_MARKET_TENANT").output().unwrap()
    }

    fn ask(&self, args: &[&str]) -> Output {
        self.ask_as(TOKEN, args)
    }

    /// Returns the output of a command, which must succeed.
    fn told(&self, args: &[&str]) -> String {
        let output = self.ask(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.told(&[args, &["-o", "json"]].concat())).unwrap()
    }
}

fn inside(body: impl FnOnce(&Market) + Send) {
    netns::run(|| async {
        tokio::task::block_in_place(|| body(&Market::serve()));
        Ok::<(), std::convert::Infallible>(())
    });
}

#[test]
fn bid_is_placed_shown_amended_and_cancelled() {
    inside(|market| {
        let table = market.told(&["price", "a100-4x"]);
        let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["MARKET", "QUOTE", "CLEARING", "RESERVE", "CAP", "FREE"]);
        assert_eq!(lines[1], ["a100-4x/local", "3.2000", "2.0000", "2.0000", "8.0000", "0"]);
        let placed = market.json(&[
            "bid",
            "place",
            "a100-4x",
            "local",
            "--limit",
            "2.08",
            "--quantity",
            "2",
            "--key",
            "k",
        ]);
        let id = placed["items"][0]["bid"].as_str().unwrap().to_owned();
        let again = market.json(&[
            "bid",
            "place",
            "a100-4x",
            "local",
            "--limit",
            "2.08",
            "--quantity",
            "2",
            "--key",
            "k",
        ]);
        assert_eq!(
            (again["items"][0]["bid"].as_str(), &again["items"][0]["replayed"]),
            (Some(id.as_str()), &Value::Bool(true))
        );
        assert_eq!(market.told(&["bids", "-o", "name"]), format!("{id}\n"));
        let bids = market.json(&["bids"]);
        assert_eq!(bids["kind"], "BidList");
        assert_eq!(
            (&bids["items"][0]["limit"], &bids["items"][0]["units"]["open"]),
            (&"2.0800".into(), &2.into())
        );
        assert!(market.told(&["bids", "-o", "wide"]).contains("TENANT"));
        assert!(market.told(&["bids", "-o", "yaml"]).contains("kind: BidList"));
        assert!(market.told(&["explain", &id]).contains("rank 1 of"), "{}", market.told(&["explain", &id]));
        let amended = market.json(&["bid", "amend", &id, "--limit", "3", "--quantity", "1"]);
        assert_eq!(amended["items"][0]["bid"], id.as_str());
        assert_eq!(market.json(&["bids"])["items"][0]["limit"], "3.0000");
        let bands = market.json(&["book", "a100-4x", "local"]);
        let units: u64 =
            bands["items"].as_array().unwrap().iter().map(|b| b["units"].as_u64().unwrap()).sum();
        assert_eq!(units, 1);
        assert_eq!(market.json(&["budget"])["items"][0]["committed"], "3.0000");
        let simulated = market.json(&["simulate", "a100-4x", "local", "--limit", "4"]);
        assert_eq!(simulated["items"][0]["atOnce"], 0, "nothing is free");
        market.told(&["bid", "cancel", &id]);
        assert_eq!(market.told(&["bids", "-o", "name"]), "");
        assert_eq!(market.told(&["bids", "-a", "-o", "name"]), format!("{id}\n"));
        for verb in
            [&["allocations"][..], &["lots"], &["charges"], &["top"], &["history", "a100-4x", "local"]]
        {
            market.told(verb);
        }
        assert!(market.json(&["verify", "a100-4x", "local"])["items"][0]["sound"].as_bool().unwrap());
    });
}

/// 0 success, 1 refused by a rule, 2 usage, 3 not found, 4 conflict, 6 unreachable, 7 forbidden.
#[test]
fn exit_codes_match_the_contract() {
    inside(|market| {
        let id = market.json(&["bid", "place", "a100-4x", "local", "--limit", "2", "--key", "same"]);
        let id = id["items"][0]["bid"].as_str().unwrap().to_owned();
        let place = |rest: &'static [&'static str]| [&["bid", "place", "a100-4x", "local"], rest].concat();
        let unknown = "0".repeat(26);
        market.told(&["halt", "l40s-4x", "local"]);
        for (why, args, want) in [
            ("a halted market", vec!["bid", "place", "l40s-4x", "local", "--limit", "2"], 1),
            ("no limit", place(&[]), 2),
            ("an invalid price", place(&["--limit", "2.0000001"]), 2),
            ("off the tick", place(&["--limit", "2.00001"]), 2),
            ("no units", place(&["--limit", "2", "--quantity", "0"]), 2),
            ("nothing to change", vec!["bid", "amend", &id], 2),
            ("no such market", vec!["bid", "place", "moon-1x", "local", "--limit", "2"], 3),
            ("no such bid", vec!["bid", "cancel", &unknown], 3),
            ("no such type", vec!["price", "moon-1x"], 3),
            ("no past yet", vec!["advise", "a100-4x", "local", "--for", "6h"], 1),
            ("an old version", place(&["--limit", "2", "--if-version", "77"]), 4),
            ("a key of another bid", place(&["--limit", "3", "--key", "same"]), 4),
        ] {
            let output = market.ask(&args);
            assert_eq!(output.status.code(), Some(want), "{why}: {}", text(&output.stderr));
            assert!(text(&output.stderr).starts_with("error"), "{why}: {}", text(&output.stderr));
        }
        market.told(&["resume", "l40s-4x", "local"]);
        market.told(&["bid", "place", "l40s-4x", "local", "--limit", "2"]);
        market.told(&["bid", "cancel", &id]);
        let twice = market.ask(&["bid", "cancel", &id]);
        assert_eq!(twice.status.code(), Some(1), "a rule refuses: {}", text(&twice.stderr));
        assert_eq!(market.ask_as("wrong", &["price"]).status.code(), Some(7));
        let mut silent = Command::new(CORACLE);
        let silent =
            silent.args(["market", "price", "--url", &format!("http://{}", free())]).output().unwrap();
        assert_eq!(silent.status.code(), Some(6), "{}", text(&silent.stderr));
        assert!(text(&silent.stderr).contains("help:"), "{}", text(&silent.stderr));
    });
}

/// A token has its scopes, is listed without its secret, and is refused after it is revoked.
#[test]
fn token_is_minted_listed_and_revoked() {
    inside(|market| {
        let minted = market.json(&["token", "mint", "c/ns", "--scope", "read,trade"]);
        let token = minted["items"][0]["token"].as_str().unwrap().to_owned();
        assert_eq!(minted["items"][0]["scopes"], serde_json::json!(["read", "trade"]));
        let other = market.told(&["token", "mint", "c/ns", "--scope", "read", "-o", "name"]);
        assert!(market.ask_as(&token, &["bids"]).status.success());
        assert_eq!(market.ask_as(&token, &["token", "list"]).status.code(), Some(7), "no scope admin");
        let listed = market.json(&["token", "list", "c/ns"]);
        let items = listed["items"].as_array().unwrap();
        assert_eq!(items.len(), 2, "{listed}");
        assert!(!listed.to_string().contains(&token), "{listed}");
        let of_token = |item: &&Value| item["scopes"].as_array().unwrap().len() == 2;
        let id = items.iter().find(of_token).unwrap()["id"].as_str().unwrap();
        market.told(&["token", "revoke", id]);
        assert_eq!(market.ask_as(&token, &["bids"]).status.code(), Some(7), "it is revoked");
        assert!(market.ask_as(other.trim(), &["bids"]).status.success(), "the other one is not");
        assert_eq!(market.ask(&["token", "revoke", id]).status.code(), Some(3), "twice");
    });
}

/// The server uses the certificate of its flags, and clients trust the given authority.
#[test]
fn market_and_commands_speak_tls() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let pair =
        || rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    let (own, other) = (pair(), pair());
    let certificate = write("tls.crt", &own.cert.pem());
    let key = write("tls.key", &own.signing_key.serialize_pem());
    let untrusted = write("other.crt", &other.cert.pem());
    netns::run(|| async {
        tokio::task::block_in_place(|| {
            let market = Market::serve_with(&["--tls-cert", &certificate, "--tls-key", &key], &certificate);
            let ask = |args: &[&str]| {
                let mut command = Command::new(CORACLE);
                command.args(["market", "price", "--url", &market.url, "--token", TOKEN]).args(args);
                command.env_remove("CORACLE_MARKET_CA").output().unwrap()
            };
            assert_eq!(ask(&[]).status.code(), Some(2), "no authority is named");
            assert_eq!(ask(&["--ca", &untrusted]).status.code(), Some(6), "another authority");
            assert!(ask(&["--ca", &certificate]).status.success());
        });
        Ok::<(), std::convert::Infallible>(())
    });
}

#[test]
fn crd_print_adds_instance_types() {
    let output = Command::new(CORACLE).args(["crd", "print", "--add-instance-type=t4-1x"]).output().unwrap();
    assert!(output.status.success());
    let printed = text(&output.stdout);
    assert!(printed.contains("- t4-1x") && printed.contains("name: bidnodes.kubebid.io"), "{printed}");
}
