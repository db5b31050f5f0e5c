//! Pages of the registry in a browser (headless Chromium): operated by keyboard, under their policy, with screenshots.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use base64::Engine;
use coracle_registry::{Config, Metrics, serve};
use coracle_testkit::tools;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Limit of every operation of the browser.
const LIMIT: Duration = Duration::from_secs(60);

/// Browser controlled through a pipe (Chrome DevTools Protocol). Killed on drop.
struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last: u64,
    /// Console messages of the pages, and what their policy blocked.
    log: Vec<String>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ended_before = self.child.kill();
        let _ended_before = self.child.wait();
    }
}

impl Browser {
    fn start(program: &Path, profile: &Path) -> Self {
        // The protocol uses the file descriptors 3 and 4.
        let line = "exec \"$0\" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                    --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut command = Command::new("sh");
        command.args(["-c", line]).arg(program).arg(profile);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (send, messages) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                message.pop();
                if send.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self { child, input, messages, session: None, last: 0, log: Vec::new() };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    fn next(&mut self) -> Value {
        let message = self.messages.recv_timeout(LIMIT).expect("the browser answers");
        if matches!(message["method"].as_str(), Some("Log.entryAdded" | "Runtime.exceptionThrown")) {
            self.log.push(message["params"].to_string());
        }
        message
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.clone().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.next();
            if answer["id"] == self.last {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    fn until(&mut self, event: &str) {
        while self.next()["method"] != event {}
    }

    fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.until("Page.loadEventFired");
    }

    fn key(&mut self, key: &str, code: u32) {
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let event =
                json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    fn ask(&mut self, expression: &str) -> String {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression}));
        answer["result"]["value"].as_str().unwrap_or_default().to_owned()
    }

    /// Presses Tab until the element with the name `text` has the focus, then Enter, and waits for the next page.
    fn follow(&mut self, text: &str) {
        let mut passed = Vec::new();
        for _ in 0..40 {
            self.key("Tab", 9);
            let focused = self.ask("document.activeElement.textContent");
            if focused == text {
                self.key("Enter", 13);
                self.until("Page.loadEventFired");
                return;
            }
            passed.push(focused);
        }
        panic!("no way to {text:?} by keyboard, only to {passed:?}");
    }

    /// Saves a screenshot of the page for human review.
    fn picture(&mut self, file: &Path) {
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let bytes = base64::engine::general_purpose::STANDARD.decode(shot["data"].as_str().unwrap()).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 2000, "a picture with something in it");
        std::fs::write(file, bytes).unwrap();
    }
}

async fn push(base: &str, token: &str) {
    let http = reqwest::Client::new();
    let named = coracle_testkit::oci::digest(b"{}");
    let url = format!("{base}/v2/team/app/blobs/uploads/?digest={named}");
    assert_eq!(http.post(url).bearer_auth(token).body("{}").send().await.unwrap().status(), 201);
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let blob = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": named, "size": 2});
    let note = "<script>document.title = 'taken over'</script>";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": kind, "config": blob, "layers": [blob], "annotations": {"note": note},
    });
    let url = format!("{base}/v2/team/app/manifests/v1");
    let put = http.put(url).bearer_auth(token).header("content-type", kind).body(manifest.to_string());
    assert_eq!(put.send().await.unwrap().status(), 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_usable_by_keyboard_under_their_policy() {
    let Some([chromium]) = tools::require(["chromium"]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let config = Config::new(state.clone(), "127.0.0.1:0".parse().unwrap());
    let metrics = Metrics::register(&mut Default::default());
    let (stop, task, (send, ready)) = (CancellationToken::new(), TaskTracker::new(), oneshot::channel());
    let until = stop.clone();
    task.spawn(async move {
        serve(config, metrics, until, move |r| send.send(r.address).unwrap()).await.unwrap()
    });
    let base = format!("http://{}", ready.await.unwrap());
    let token = std::fs::read_to_string(state.join("token")).unwrap().trim().to_owned();
    push(&base, &token).await;
    let policy = reqwest::get(&base).await.unwrap().headers()["content-security-policy"].clone();
    assert!(policy.to_str().unwrap().starts_with("default-src 'none'"), "{policy:?}");

    let pictures = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let profile = dir.path().join("profile");
    let walked = tokio::task::spawn_blocking(move || {
        let mut browser = Browser::start(&chromium, &profile);
        browser.open(&format!("{base}/"));
        browser.picture(&pictures.join("registry-home.png"));
        browser.key("Tab", 9);
        assert_eq!(browser.ask("document.activeElement.textContent"), "Skip to content");
        browser.follow("team/app");
        assert!(browser.ask("document.title").starts_with("team/app"));
        browser.follow("v1");
        assert!(browser.ask("document.title").contains("v1"), "untrusted text is not a script");
        assert!(browser.ask("document.body.innerText").contains("taken over"), "it is shown as text");
        browser.picture(&pictures.join("registry-manifest.png"));
        browser.follow("Repositories");
        assert!(browser.ask("document.title").starts_with("Repositories"));
        let styled = browser.ask("getComputedStyle(document.querySelector('.skip')).position");
        assert_eq!(styled, "absolute", "the style sheet is let through by the policy");
        let script = "{const s = document.createElement('script'); s.textContent = 'document.title = \"x\"'; \
                      document.body.append(s); document.title}";
        assert!(browser.ask(script).starts_with("Repositories"), "no script runs");
        // Sends the token as a browser does after a password prompt.
        browser.open(&format!("{}/tokens", base.replace("http://", &format!("http://anybody:{token}@"))));
        assert!(browser.ask("document.title").starts_with("Tokens"), "{}", browser.ask("document.title"));
        std::mem::take(&mut browser.log)
    });
    let log = walked.await.unwrap();
    let violations: Vec<_> = log.iter().filter(|l| !l.contains("favicon")).collect();
    assert_eq!(violations.len(), 1, "only the script of this test is refused: {violations:#?}");
    stop.cancel();
    task.close();
    task.wait().await;
}
